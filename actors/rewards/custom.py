"""A user's own reward function, `module:function`, called the way verl or TRL calls it.

verl: compute_score(data_source, solution_str, ground_truth, extra_info), which returns a number, or
a dict with `score`, `acc` and other numbers. TRL: reward_func(prompts, completions, **columns),
which returns a list of numbers or None. A TRL function is given lists of one completion, so that a
hang costs one completion and not the group.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from actors.rewards.builtin import Grade, Sample

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
TRL = ("prompts", "completions")


class RewardError(Exception):
    """A reward function that cannot be used. Says what was found and what to do."""


def load(name: str, style: str, answer_field: str, options: dict[str, Any]) -> Grade:
    """Import `module:function` and wrap it.

    Args:
        style: `verl`, `trl`, or `auto` (by the names of the parameters).
        answer_field: name of the answer's column, under which TRL functions expect it.
        options: further keyword arguments.

    Raises RewardError.
    """
    function = _import(name)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise RewardError(f"{name}: has no signature that can be read; wrap it in a def") from None
    names = set(signature.parameters)
    if style == "auto":
        style = _style(name, names)
    if style == "verl":
        _bindable(name, signature, dict.fromkeys(VERL), options)
        return _verl(function, options)
    columns = {*TRL, answer_field, "data_source"}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    accepted = None if open_ended else names
    given = columns if accepted is None else columns & accepted
    # A column that only the data knows cannot be checked here; it is checked at each call.
    _bindable(name, signature, dict.fromkeys(given), options, partial=True)
    return _trl(function, accepted, answer_field, options)


def _import(name: str) -> Callable[..., Any]:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise RewardError(f"{name!r}: is none of exact, numeric, math, and not module:function")
    try:
        target: Any = importlib.import_module(module_name)
    except BaseException as error:
        raise RewardError(
            f"{name}: module {module_name} cannot be imported ({type(error).__name__}: {error}); "
            "modules are looked for in the working directory of the command and in PYTHONPATH"
        ) from None
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise RewardError(f"{name}: module {module_name} has no {attribute}")
        target = getattr(target, part)
    if not callable(target):
        raise RewardError(f"{name}: is a {type(target).__name__}, not a function")
    return target  # type: ignore[no-any-return]


def _style(name: str, names: set[str]) -> str:
    if "solution_str" in names:
        return "verl"
    if "completions" in names:
        return "trl"
    raise RewardError(
        f"{name}: parameters {sorted(names)} are neither verl's {list(VERL)} nor TRL's "
        f"{[*TRL, '**columns']}; rename them, or set style"
    )


def _bindable(
    name: str,
    signature: inspect.Signature,
    given: dict[str, Any],
    options: dict[str, Any],
    *,
    partial: bool = False,
) -> None:
    try:
        (signature.bind_partial if partial else signature.bind)(**{**given, **options})
    except TypeError as error:
        raise RewardError(
            f"{name}{signature}: cannot be called with {sorted({*given, *options})}: {error}"
        ) from None


def _verl(function: Callable[..., Any], options: dict[str, Any]) -> Grade:
    def grade(sample: Sample) -> Any:
        return _value(
            function(
                data_source=sample.data_source,
                solution_str=sample.text,
                ground_truth=sample.answer,
                extra_info=sample.extra,
                **options,
            )
        )

    return grade


def _trl(
    function: Callable[..., Any],
    accepted: set[str] | None,
    answer_field: str,
    options: dict[str, Any],
) -> Grade:
    def grade(sample: Sample) -> Any:
        chat = not isinstance(sample.prompt, str)
        completion = [{"role": "assistant", "content": sample.text}] if chat else sample.text
        columns = {
            **sample.extra,
            "data_source": sample.data_source,
            answer_field: sample.answer,
            "prompts": sample.prompt,
            "completions": completion,
        }
        lists = {k: [v] for k, v in columns.items() if accepted is None or k in accepted}
        values = _value(function(**lists, **options))
        try:
            (value,) = values
        except (TypeError, ValueError):
            raise RewardError(
                f"returned {values!r:.80} for one completion; a list of one number or None "
                "is expected"
            ) from None
        return value

    return grade


def _value(result: Any) -> Any:
    return asyncio.run(result) if inspect.iscoroutine(result) else result
