"""Published weights on disk: found under the weights root, complete, and as their sender made them.

Invariant: an engine is given a directory only after every listed file's SHA-256 has been checked,
and only safetensors are weights: no file that runs code when loaded is accepted.
"""

from __future__ import annotations

import hashlib
from pathlib import Path, PurePosixPath

from protocol.messages import WeightsPublished

WEIGHTS = ".safetensors"
# What a directory in Hugging Face layout holds besides: read as text or JSON, never as a pickle.
BESIDE = (".json", ".jinja", ".txt", ".model", ".tiktoken")


class WeightsError(Exception):
    """Weights that are not there yet, no longer there, or damaged. Trying again may help."""


class WeightsRefused(Exception):
    """Weights that must not be loaded, however often one tries."""


def verify(message: WeightsPublished, root: Path) -> Path:
    """The directory of the published weights, after checking it; reads every byte.

    Raises WeightsRefused, WeightsError.
    """
    directory = locate(message, root)
    listed = set(message.files)
    try:
        present = {entry.name for entry in directory.iterdir()}
    except OSError as error:
        raise WeightsError(
            f"weights {message.version}: {directory} cannot be read ({error.strerror})"
        ) from None
    # The engine loads every such file that it finds.
    if extra := {name for name in present if name.endswith(WEIGHTS)} - listed:
        raise WeightsError(
            f"weights {message.version}: {directory} holds {sorted(extra)}, not in its manifest"
        )
    for name, digest in message.files.items():
        try:
            with (directory / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise WeightsError(
                f"weights {message.version}: {directory / name} cannot be read ({error.strerror})"
            ) from None
        if found != digest.lower():
            raise WeightsError(
                f"weights {message.version}: {directory / name} has SHA-256 {found}, "
                f"{digest} published"
            )
    return directory


def locate(message: WeightsPublished, root: Path) -> Path:
    """Where the weights lie. Raises WeightsRefused for a path or file that is not allowed."""
    root = root.resolve()
    directory = (root / message.path).resolve()
    if not directory.is_relative_to(root) or directory == root:
        raise WeightsRefused(
            f"weights {message.version}: path {message.path!r} does not lie under {root}"
        )
    for name in message.files:
        if PurePosixPath(name).name != name or name in (".", ".."):
            raise WeightsRefused(f"weights {message.version}: {name!r} is no plain file name")
        if not name.endswith((WEIGHTS, *BESIDE)):
            raise WeightsRefused(
                f"weights {message.version}: {name}: only safetensors and tokenizer files are "
                "loaded"
            )
    if not any(name.endswith(WEIGHTS) for name in message.files):
        raise WeightsRefused(f"weights {message.version}: lists no safetensors file")
    return directory
