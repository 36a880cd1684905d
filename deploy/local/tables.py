"""The tables of the report: accounts, groups by reason, rates and counts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from deploy.local.history import History
from protocol.records import ReasonCount

REASONS = {
    "heap": "most variance expected",
    "unseen": "never visited",
    "explore": "drawn uniformly",
    "retest_solved": "solved, due again",
    "retest_unsolved": "unsolved, due again",
    "fallback": "nothing else to offer",
    "refill": "in place of a group without use",
}
ENDS = {
    "trained": "in an optimizer step",
    "zero_variance": "all rewards equal, so nothing to learn",
    "stale": "too old when its step was trained",
    "impure": "no proof of one version",
    "skipped": "loss or gradient not finite",
    "failed": "no group stood: grader, size, prompt",
    "expired": "no outcome in time",
    "surplus": "not needed any more",
    "evaluated": "evaluation",
}


def _table(title: str, note: str, head: Sequence[str], rows: Iterable[str]) -> str:
    names = "".join(
        f'<th scope="col" class="{"n" if name[0] == "#" else "t"}">{escape(name.lstrip("#"))}</th>'
        for name in head
    )
    return (
        f'<div class="card"><h3>{escape(title)}</h3><p class="soft small">{escape(note)}</p>'
        f"<table><thead><tr>{names}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _row(cells: Sequence[str], *, total: bool = False, texts: int = 2) -> str:
    """`texts` cells of text, then numbers."""
    inner = "".join(
        f"<td>{escape(cell)}</td>" if i < texts else f'<td class="n">{escape(cell)}</td>'
        for i, cell in enumerate(cells)
    )
    return f"<tr{' class=sum' if total else ''}>{inner}</tr>"


def accounts(summary: dict[str, Any]) -> str:
    """Every end and its number of tasks."""
    given = summary["accounts"]
    if given is None:
        return ""
    rows = [
        _row([name.replace("_", " "), ENDS.get(name, ""), f"{count:,}"])
        for name, count in given["ends"].items()
        if count
    ]
    kinds = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in given["zero_variance"].items()
    )
    rows.append(_row(["in flight", "without an end yet", f"{given['in_flight']:,}"]))
    rows.append(_row(["issued", "the sum of the above", f"{given['issued']:,}"], total=True))
    note = "Every issued task ends exactly once."
    note += f" Zero variance: {kinds}." if kinds else ""
    note += f" Impure groups trained: {summary['impure_groups_trained']}."
    return _table("Accounts", note, ["end", "meaning", "#tasks"], rows)


def reasons(history: History) -> str:
    """What came of each reason of choice."""
    sums: dict[str, ReasonCount] = {}
    for step in history.steps:
        for name, count in step.by_reason.items():
            total = sums.setdefault(name, ReasonCount())
            total.groups += count.groups
            total.mixed += count.mixed
            total.zero_variance += count.zero_variance
            total.correct += count.correct
    rows = [
        _row(
            [
                name.replace("_", " "),
                REASONS.get(name, ""),
                f"{c.groups:,}",
                f"{c.mixed / c.groups:.0%}",
                f"{c.zero_variance / c.groups:.0%}",
                f"{c.correct / c.groups:.2f}",
            ]
        )
        for name, c in sums.items()
        if c.groups
    ]
    if not rows:
        return ""
    return _table(
        "Groups by reason",
        "Why the strategy chose each problem, and what came of it.",
        ["reason", "meaning", "#groups", "#mixed", "#zero var.", "#correct"],
        rows,
    )


def rates(history: History, summary: dict[str, Any]) -> str:
    """Speed, and what is worth counting."""
    speed = summary["tokens_per_second"]
    rows = [
        ("tokens sampled a second, actors generating", _rate(speed["actor"])),
        ("tokens trained a second, learner training", _rate(speed["learner"])),
    ]
    if history.steps:
        rows += _counts(history)
    return _table(
        "Rates and counts",
        "Over the whole run.",
        ["figure", "#value"],
        [_row(row, texts=1) for row in rows],
    )


def _counts(history: History) -> list[tuple[str, str]]:
    steps, last = history.steps, history.steps[-1]
    rows = [
        ("rollout tokens", f"{last.rollout_tokens:,}"),
        ("different problems visited", f"{last.distinct_problems:,}"),
        ("most visits of one problem", f"{last.most_visits:,}"),
    ]
    lag: dict[str, int] = {}
    for step in steps:
        for age, groups in step.lag.items():
            lag[age] = lag.get(age, 0) + groups
    rows += [(f"groups trained at lag {age}", f"{n:,}") for age, n in sorted(lag.items())]
    for name, count in (
        ("steps with a smaller batch than planned", sum(s.groups < s.planned for s in steps)),
        ("rounds that came out empty", sum(s.empty_rounds for s in steps)),
        (
            "groups with variance in the reward alone",
            sum(c.shaping_only for s in steps for c in s.by_reason.values()),
        ),
    ):
        if count:
            rows.append((name, f"{count:,}"))
    return rows + _dropped(history)


def _dropped(history: History) -> list[tuple[str, str]]:
    """Dropping stragglers favours short answers: their length beside that of what was trained."""
    steps = history.steps
    dropped = sum(step.dropped for step in steps)
    if not dropped:
        return []
    late = [s.dropped_length for s in steps if s.dropped_length is not None]
    trained = [s.learner["length_mean"] for s in steps if "length_mean" in s.learner]
    return [
        ("stragglers given up", f"{dropped:,}"),
        ("tokens a completion, stragglers that came in late", _mean(late)),
        ("tokens a completion, trained groups", _mean(trained)),
    ]


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.1f}" if values else "–"


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"
