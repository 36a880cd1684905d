"""Only weights that lie under the root, as they were published, reach the engine."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from actors.weights import WeightsError, WeightsRefused, verify
from protocol.messages import WeightsPublished
from protocol.versions import Version

CONTENT = {"model.safetensors": b"weights", "config.json": b"{}"}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "weights" / "0.1"
    directory.mkdir(parents=True)
    for name, content in CONTENT.items():
        (directory / name).write_bytes(content)
    return tmp_path / "weights"


def message(**fields: Any) -> WeightsPublished:
    files = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENT.items()}
    return WeightsPublished(
        **{"version": Version(0, 1), "path": "0.1", "files": files, "bytes": 9, **fields}
    )


def test_what_was_published_is_accepted(root: Path) -> None:
    assert verify(message(), root) == root / "0.1"
    assert verify(message(path=str(root / "0.1")), root) == root / "0.1"


@pytest.mark.parametrize("path", ["..", ".", "../outside", "/etc", "0.1/../.."])
def test_a_path_outside_the_root_is_refused(root: Path, path: str) -> None:
    with pytest.raises(WeightsRefused, match="does not lie under"):
        verify(message(path=path), root)


def test_a_link_that_leads_outside_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(WeightsRefused, match="does not lie under"):
        verify(message(path="link"), root)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "code.py", "../x.safetensors"])
def test_only_safetensors_and_tokenizer_files_are_accepted(root: Path, name: str) -> None:
    with pytest.raises(WeightsRefused):
        verify(message(files={**message().files, name: "0" * 64}), root)


def test_without_a_safetensors_file_there_are_no_weights(root: Path) -> None:
    with pytest.raises(WeightsRefused, match="no safetensors"):
        verify(message(files={"config.json": message().files["config.json"]}), root)


def test_a_changed_missing_or_additional_file_is_an_error(root: Path) -> None:
    (root / "0.1" / "more.safetensors").write_bytes(b"x")
    with pytest.raises(WeightsError, match="not in its manifest"):
        verify(message(), root)
    (root / "0.1" / "more.safetensors").unlink()
    (root / "0.1" / "model.safetensors").write_bytes(b"Weights")
    with pytest.raises(WeightsError, match="has SHA-256"):
        verify(message(), root)
    (root / "0.1" / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="cannot be read"):
        verify(message(), root)
