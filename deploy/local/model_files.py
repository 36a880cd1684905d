"""Is the model to train there, and does it fit the run? Reads JSON files only."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from protocol.config import HUB, Config

HUB_SECONDS = 5.0
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Names that model families give to their longest sequence.
LENGTHS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")


def check_model(config: Config, *, offline: bool) -> list[str]:
    """One line for each mistake in `model` and in the lengths that depend on it."""
    path = config.model.path
    if path.startswith(HUB):
        return [] if offline else _check_hub(path)
    return _check_directory(config, Path(path))


def _check_directory(config: Config, folder: Path) -> list[str]:
    where = f"model.path: {folder}"
    if not folder.exists():
        return [f"{where}: no such directory; give one in Hugging Face layout, or {HUB}org/name"]
    if not folder.is_dir():
        return [f"{where}: is no directory"]
    lines = []
    model = _read_json(folder / "config.json")
    if isinstance(model, str):
        lines.append(f"{where}: config.json: {model}")
    else:
        lines += _check_length(config, model)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        lines.append(f"{where}: no tokenizer; one of {', '.join(TOKENIZERS)} is expected")
    if not any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
        lines.append(f"{where}: no weights; *.safetensors is expected")
    if config.model.chat_template == "always" and not has_chat_template(folder):
        lines.append(
            f"model.chat_template: always, but the model in {folder} has none; use auto or never"
        )
    return lines


def _check_length(config: Config, model: dict[str, Any]) -> list[str]:
    inner = model.get("text_config")
    levels = [model, inner] if isinstance(inner, dict) else [model]
    longest = next(
        (level[name] for level in levels for name in LENGTHS if isinstance(level.get(name), int)),
        None,
    )
    rollout = config.rollout
    lengths = {"rollout.max_tokens": rollout.max_tokens}
    lengths |= {
        f"eval.{i}.max_tokens": each.max_tokens
        for i, each in enumerate(config.eval)
        if each.max_tokens is not None
    }
    return [
        f"rollout.max_prompt_tokens + {field}: {rollout.max_prompt_tokens} + {tokens} = "
        f"{rollout.max_prompt_tokens + tokens} is more than the {longest} positions of the model "
        f"in {config.model.path}; lower one of them"
        for field, tokens in lengths.items()
        if longest is not None and rollout.max_prompt_tokens + tokens > longest
    ]


def has_chat_template(folder: Path) -> bool:
    """Does the tokenizer of a model directory have a chat template?"""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    tokenizer = _read_json(folder / "tokenizer_config.json")
    return isinstance(tokenizer, dict) and bool(tokenizer.get("chat_template"))


def _read_json(path: Path) -> dict[str, Any] | str:
    """The object in a file, or what is wrong with it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "no such file"
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"
    return value if isinstance(value, dict) else "is no JSON object"


def _check_hub(path: str) -> list[str]:
    name = path.removeprefix(HUB)
    if _cached(name):
        return []
    base = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    request = urllib.request.Request(f"{base}/{name}/resolve/main/config.json", method="HEAD")
    if token := os.environ.get("HF_TOKEN"):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=HUB_SECONDS):
            return []
    except urllib.error.HTTPError as error:
        return [
            f"model.path: {path}: {base} answers {error.code} ({error.reason}); check the name, "
            "and set HF_TOKEN where the model is gated"
        ]
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return [
            f"model.path: {path}: {base} cannot be reached ({reason}); name a local directory, or "
            "check with --offline"
        ]


def _cached(name: str) -> bool:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    return any((hub / f"models--{name.replace('/', '--')}" / "snapshots").glob("*/config.json"))
