"""Generations and weights on disk."""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from learner import weights
from learner.generation import take_generation
from protocol.versions import Version


def write(root: Path, version: Version, content: bytes = b"w") -> Path:
    directory = weights.prepare(root, version)
    (directory / "model.safetensors").write_bytes(content)
    (directory / "config.json").write_text("{}")
    return directory


def publish_all(root: Path, count: int, *, keep: int, max_lag: int) -> set[str]:
    for step in range(count):
        version = Version(0, step)
        weights.publish(write(root, version), version)
        weights.prune(root, version, keep=keep, max_lag=max_lag)
    return {p.name for p in root.iterdir()}


def test_generations_rise_from_zero_and_skip_none_that_was_taken(tmp_path: Path) -> None:
    assert [take_generation(tmp_path) for _ in range(3)] == [0, 1, 2]
    (tmp_path / "7").mkdir()
    assert take_generation(tmp_path) == 8


def test_no_two_learners_take_the_same_generation(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: take_generation(tmp_path), range(64)))
    assert sorted(taken) == list(range(64))


def test_published_weights_are_complete_and_as_their_manifest_says(tmp_path: Path) -> None:
    message = weights.publish(write(tmp_path, Version(2, 5), b"abc"), Version(2, 5))
    assert message.path == "2.5"
    assert {p.name for p in tmp_path.iterdir()} == {"2.5"}
    manifest = json.loads((tmp_path / "2.5" / "manifest.json").read_text())
    assert manifest == {"version": "2.5", "files": message.files, "bytes": message.bytes}
    assert message.bytes == 3 + 2
    assert message.files == {
        name: hashlib.sha256((tmp_path / "2.5" / name).read_bytes()).hexdigest()
        for name in ("config.json", "model.safetensors")
    }


def test_a_directory_without_its_final_name_is_not_taken_for_a_version(tmp_path: Path) -> None:
    write(tmp_path, Version(0, 1))
    assert not list(tmp_path.glob("*/manifest.json"))
    with pytest.raises(ValueError, match="not of the form"):
        Version.parse(next(tmp_path.iterdir()).name)


def test_the_newest_versions_stay(tmp_path: Path) -> None:
    assert publish_all(tmp_path, 7, keep=3, max_lag=0) == {"0.4", "0.5", "0.6"}


def test_versions_whose_groups_may_still_be_trained_stay_whatever_keep_says(tmp_path: Path) -> None:
    assert publish_all(tmp_path, 9, keep=2, max_lag=3) == {"0.4", "0.5", "0.6", "0.7", "0.8"}


def test_what_a_dead_learner_left_half_written_goes(tmp_path: Path) -> None:
    write(tmp_path, Version(0, 9))
    weights.publish(write(tmp_path, Version(1, 0)), Version(1, 0))
    weights.prune(tmp_path, Version(1, 0), keep=2, max_lag=0)
    assert {p.name for p in tmp_path.iterdir()} == {"1.0"}


def test_the_export_is_a_plain_model_directory_and_replaces_an_older_one(tmp_path: Path) -> None:
    root, model = tmp_path / "weights", tmp_path / "model"
    for step, content in enumerate((b"old", b"new")):
        version = Version(0, step)
        weights.publish(write(root, version, content), version)
        weights.export(root / str(version), model)
    assert {p.name for p in model.iterdir()} == {"config.json", "model.safetensors"}
    assert (model / "model.safetensors").read_bytes() == b"new"
    assert {p.name for p in tmp_path.iterdir()} == {"weights", "model"}
