"""docs/configuration.md: every field of the config file, from its own type and sentence.

`python -m deploy.local.reference` prints the page, `--write` writes it; a test holds the committed
page to it.
"""

from __future__ import annotations

import sys
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from protocol.config import SECRETS, Config, PrioritizedConfig, UniformConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HEAD = """# Configuration

One YAML file describes a run: `reprise check FILE` validates it, `reprise run FILE` runs it. A key
that is not on this page is an error. `--set section.field=value` overrides a field for one command.
Paths of inputs are relative to the config file, `run.dir` to where the command is started. All
durations are seconds.

This page is made from the field descriptions in `protocol/config.py`:
`python -m deploy.local.reference --write`.
"""
VARIANTS: dict[str, tuple[type[BaseModel], ...]] = {"strategy": (PrioritizedConfig, UniformConfig)}
LISTS = ("eval",)


def page() -> str:
    """The whole page, as Markdown."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        if name in VARIANTS:
            parts.append(f"## {name}\n\n{_sentence(field)} One of:\n")
            for variant in VARIANTS[name]:
                title = get_args(variant.model_fields["name"].annotation)[0]
                parts.append(f"### `{name}.name: {title}`\n\n{_doc(variant)}\n")
                parts.append(_table(variant))
            continue
        section = _section(field.annotation)
        title = f"{name} (a list)" if name in LISTS else name
        parts.append(f"## {title}\n\n{_doc(section)}\n")
        parts.append(_table(section))
        parts += _nested(name, section)
    parts.append(_secrets())
    return "\n".join(parts)


def _nested(name: str, section: type[BaseModel]) -> list[str]:
    parts = []
    for inner, field in section.model_fields.items():
        try:
            model = _section(field.annotation)
        except TypeError:
            continue
        suffix = " (a list)" if get_origin(_bare(field.annotation)) is list else ""
        parts.append(f"### {name}.{inner}{suffix}\n\n{_doc(model)}\n")
        parts.append(_table(model))
    return parts


def _table(section: type[BaseModel]) -> str:
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, field in section.model_fields.items():
        kind = f"`{_escape(type_text(field.annotation))}`"
        # The field that chooses among the variants has one value and needs no sentence.
        meaning = _escape(_sentence(field)) or "Chooses these."
        lines.append(f"| `{name}` | {kind}{_bounds(field)} | {_default(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def type_text(annotation: Any) -> str:
    """A type as a user writes values of it."""
    annotation = _bare(annotation)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " | ".join(str(value) for value in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(type_text(a) for a in arguments if a is not type(None))
    if origin in (list, tuple):
        inner = ", ".join(type_text(a) for a in arguments)
        return f"[{inner}, …]" if origin is list else f"[{inner}]"
    if origin is dict:
        return "map"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {str: "text", int: "whole number", float: "number", bool: "true | false", Path: "path"}
    return names.get(annotation, "text")


def _bare(annotation: Any) -> Any:
    while get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    return annotation


def _section(annotation: Any) -> type[BaseModel]:
    annotation = _bare(annotation)
    if get_origin(annotation) is list:
        annotation = _bare(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    raise TypeError(f"{annotation} is no section")


def _bounds(field: FieldInfo) -> str:
    """Limits of a number, from its type or from an optional one's."""
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    marks = [*field.metadata]
    for argument in typing.get_args(field.annotation):
        if get_origin(argument) is Annotated:
            for mark in get_args(argument)[1:]:
                marks += getattr(mark, "metadata", [mark])
    found = []
    for mark in marks:
        for attribute, sign in signs.items():
            value = getattr(mark, attribute, None)
            if isinstance(value, int | float) and abs(value) < 1e9:
                found.append(f"{sign} {value:,}" if isinstance(value, int) else f"{sign} {value:g}")
    return " " + ", ".join(found) if found else ""


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "*required*"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "–"
    if isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, list) and value and isinstance(value[0], BaseModel):
        return f"`[{{name: {getattr(value[0], 'name', '')}}}]`"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:.4g}`" if value != int(value) else f"`{value:g}`"
    return f"`{value}`" if str(value) else '`""`'


def _sentence(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


def _doc(model: type[BaseModel]) -> str:
    text = (model.__doc__ or "").strip()
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def _secrets() -> str:
    lines = ["## Environment", "", "These variables come last, over the file and `--set`.", ""]
    lines += ["| variable | field |", "|---|---|"]
    lines += [f"| `{name}` | `{'.'.join(place)}` |" for name, place in SECRETS.items()]
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the page, or write it with --write."""
    if arguments == ["--write"]:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
