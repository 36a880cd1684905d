"""docs/configuration.md is made from the config's own fields."""

from __future__ import annotations

import re

from deploy.local.reference import PAGE, page
from protocol.config import Config


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "run: python -m deploy.local.reference --write"
    )


def test_every_section_is_on_the_page_and_every_field_has_a_sentence() -> None:
    text = page()
    for section in Config.model_fields:
        assert re.search(rf"^## {section}\b", text, re.MULTILINE), section
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 80
    assert [name for name, sentence in rows if not sentence.strip()] == []
