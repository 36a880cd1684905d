"""What the `reprise` command prints when a run is over."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.local.summary import shown
from deploy.local.view import clock_text, number
from protocol.rundir import RunDir
from protocol.versions import Version


def result_lines(summary: dict[str, Any], run: RunDir) -> list[str]:
    """The result of a run in a few lines, and where to look further."""
    lines = [""]
    accuracy, sampled = summary["held_out_accuracy"], summary["sampled"]
    if summary["held_out_accuracy_kind"] == "exact":
        lines.append(_row("held-out accuracy", _change(accuracy) + "   exact"))
        lines.append(_row("  sampled", _sampled(sampled)))
    elif summary["held_out_accuracy_kind"] == "sampled":
        lines.append(_row("held-out accuracy", _sampled(sampled) + f"   mean@{sampled['n']}"))
    if summary["greedy_accuracy"]["before"] is not None:
        lines.append(_row("  greedy", _change(summary["greedy_accuracy"])))
    training = summary["seconds"]
    lines.append(
        _row(
            "training",
            f"{summary['steps']} steps, {summary['rollouts']:,} rollouts"
            + ("" if training is None else f", {clock_text(training)}")
            + f" ({clock_text(summary['wall_seconds'])} in all)",
        )
    )
    if summary["accounts"] is not None:
        lines.append(_row("tasks", accounts_text(summary["accounts"])))
        lines.append(_row("impure groups trained", str(summary["impure_groups_trained"])))
    if summary["end"] is not None:
        detail = summary["end"]["detail"]
        reason = summary["end"]["reason"].replace("_", " ")
        lines.append(_row("end", reason + (f": {detail}" if detail else "")))
    if summary["exported_model"] is not None:
        lines.append(_row("model", summary["exported_model"]))
    lines.append(_row("summary", shown(run.summary)))
    if run.report.is_file():
        lines.append(_row("report", shown(run.report)))
    return lines


def accounts_text(accounts: dict[str, Any]) -> str:
    """issued = Σ ends + in flight, with its numbers."""
    ends = " + ".join(f"{count:,} {name}" for name, count in accounts["ends"].items() if count)
    return f"{accounts['issued']:,} issued = {ends or 0} + {accounts['in_flight']} in flight"


def how_to_go_on(run: RunDir, command: Sequence[str]) -> str:
    """The command that starts a new run from the newest weights of this one.

    `command` started this run. Of two values for one field the later counts.
    """
    newest = newest_model(run)
    if newest is None:
        return "No weights were published; start again with: " + shlex.join(command)
    # A relative path would be looked for beside the config file.
    again = shlex.join([*command, "--set", f"model.path={newest.absolute()}"])
    return f"The newest weights are in {shown(newest)}; go on from them with:\n  {again}"


def newest_model(run: RunDir) -> Path | None:
    """The exported model, or the newest complete weights, or None."""
    if (run.model / "config.json").is_file():
        return run.model
    found: list[tuple[Version, Path]] = []
    for manifest in run.weights.glob("*/manifest.json"):
        try:
            found.append((Version.parse(manifest.parent.name), manifest.parent))
        except ValueError:
            continue
    return max(found, default=(None, None), key=lambda pair: pair[0])[1]


def _row(name: str, text: str) -> str:
    return f"{name:<22}{text}"


def _change(values: dict[str, float | None]) -> str:
    before, after = values["before"], values["after"]
    difference = "" if before is None or after is None else f"   ({after - before:+.3f})"
    return f"{number(before)} → {number(after)}{difference}"


def _sampled(sampled: dict[str, Any]) -> str:
    errors = sampled["standard_error"]
    ends = (
        number(sampled[when]) + ("" if errors[when] is None else f" ± {errors[when]:.3f}")
        for when in ("before", "after")
    )
    return " → ".join(ends)
