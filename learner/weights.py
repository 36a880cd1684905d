"""Weights as files: published by version for the actors, exported once at the end.

Invariants: a directory under its final name is complete and as its manifest says (temporary name,
manifest last, everything synced, then renamed); only safetensors hold weights; no version is
removed that an actor could still have to load.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

from protocol.messages import WeightsPublished
from protocol.versions import Version

MANIFEST = "manifest.json"
TEMPORARY = ".tmp"


def prepare(root: Path, version: Version) -> Path:
    """An empty temporary directory for `version` under the weights root."""
    directory = root / f".{version}{TEMPORARY}"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def publish(written: Path, version: Version) -> WeightsPublished:
    """Complete the temporary directory `written` and give it its final name, `<g>.<s>`.

    Returns the record that tells the actors; its path is relative to the weights root.
    """
    paths = sorted(p for p in written.iterdir() if p.is_file())
    files = {p.name: _digest(p) for p in paths}
    size = sum(p.stat().st_size for p in paths)
    for path in paths:
        _sync(path)
    manifest = {"version": str(version), "files": files, "bytes": size}
    target = written / MANIFEST
    target.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    _sync(target)
    _sync(written)
    final = written.with_name(str(version))
    written.rename(final)
    _sync(final.parent)
    return WeightsPublished(version=version, path=final.name, files=files, bytes=size)


def prune(root: Path, newest: Version, *, keep: int, max_lag: int) -> None:
    """Remove old versions but the newest `keep`, and what a dead learner left half written.

    An actor loads the newest version it has heard of, so an older one is loaded only by an actor
    that is behind. What it would sample with weights older than step `newest.step − max_lag − 1`
    can no longer be trained; those from there on stay, whatever `keep` says.
    """
    for half in root.glob(f".*{TEMPORARY}"):
        version = _version(half.name[1 : -len(TEMPORARY)])
        if version is not None and version < newest:
            shutil.rmtree(half, ignore_errors=True)
    published = [(v, p) for p in root.iterdir() if (v := _version(p.name)) is not None]
    old = sorted((v, p) for v, p in published if v <= newest)
    for _, path in old[: -max(keep, max_lag + 2)]:
        # Without its manifest it is no version any more, however far the removal gets.
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def export(published: Path, target: Path) -> None:
    """Copy a published version to `target`, a plain model directory; replaces what is there."""
    temporary = target.with_name(f".{target.name}{TEMPORARY}")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(published, temporary, ignore=shutil.ignore_patterns(MANIFEST))
    for path in temporary.iterdir():
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    _sync(target.parent)


def _version(name: str) -> Version | None:
    try:
        return Version.parse(name)
    except ValueError:
        return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
