"""Prompts become token ids once, by the model's tokenizer and chat template."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from actors.engine import PromptError
from actors.prompts import PromptEncoder
from protocol.config import ConfigError, ModelConfig
from protocol.messages import ChatMessage
from tests.actors.engines import QUICKSTART

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}+{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(QUICKSTART)


def encoder(tokenizer: Any, chat_template: str = "auto") -> PromptEncoder:
    model = ModelConfig(path="m", chat_template=chat_template)
    return PromptEncoder(tokenizer, model, max_prompt_tokens=8)


def test_plain_text_is_encoded_as_the_tokenizer_does(tokenizer: Any) -> None:
    assert encoder(tokenizer).encode("1+2=") == tokenizer("1+2=")["input_ids"]


def test_the_chat_template_is_applied_where_the_model_has_one(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    templated = tokenizer("1+=", add_special_tokens=False)["input_ids"]
    assert encoder(tokenizer).encode("1") == templated
    turns = [ChatMessage("user", "1"), ChatMessage("user", "2")]
    two = tokenizer("1+2+=", add_special_tokens=False)["input_ids"]
    assert encoder(tokenizer, "always").encode(turns) == two
    assert encoder(tokenizer, "never").encode("1") == tokenizer("1")["input_ids"]


def test_always_without_a_template_is_an_error_at_the_start(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"model\.chat_template: always"):
        encoder(tokenizer, "always")


def test_chat_turns_without_a_template_are_refused(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="chat turns"):
        encoder(tokenizer).encode([ChatMessage("user", "1")])


def test_a_prompt_is_never_cut(tokenizer: Any) -> None:
    with pytest.raises(PromptError, match="9 tokens"):
        encoder(tokenizer).encode("123456789")
    with pytest.raises(PromptError, match="leaves 3"):
        encoder(tokenizer).encode("1+2=", room=3)
