"""`report.html`: one page, without any outside file, that shows what a run did.

Invariant: made from the run directory alone, so that it can be made again at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from deploy.local.exact import read_figures
from deploy.local.history import History
from deploy.local.page import CSS, PAGE
from deploy.local.view import clock_text, number
from protocol.config import Config, load_config
from protocol.records import ReasonCount
from protocol.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    from deploy.local.plots import Plot

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


class ReportError(Exception):
    """The report cannot be made. One line that says why and what to do."""


def write_report(run: RunDir) -> None:
    """Make report.html from what lies in the run directory. Raises ReportError, ConfigError."""
    try:
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"{run.summary}: cannot be read: {error}") from None
    page = build(load_config(run.config), run, History.read(run.metrics), summary)
    write_atomic(run.report, page.encode())


def build(config: Config, run: RunDir, history: History, summary: dict[str, Any]) -> str:
    """The page. Raises ReportError where matplotlib is missing."""
    try:
        from deploy.local import plots
    except ModuleNotFoundError as error:
        raise ReportError(
            f"package {error.name} is missing; run: pip install 'reprise-rl[local]'"
        ) from None
    before, after = read_figures(run, "before"), read_figures(run, "after")
    if before is None or after is None:
        before = after = None
    evals = history.evals_of(config.eval[0].name) if config.eval else []
    main = [plots.accuracy(evals, before, after), plots.reward(history)]
    main += [plots.accuracy(history.evals_of(e.name), None, None) for e in config.eval[1:]]
    selection = [plots.zero_variance(history), plots.pools(history)]
    kinds = [plots.strata(before, after), plots.sources(evals, before, after)]
    learner = [
        plots.learner(
            history, "entropy", "Entropy", "nats a token", "Of the policy, on trained tokens."
        ),
        plots.learner(history, "grad_norm", "Gradient norm", "norm", "Before clipping."),
        plots.learner(
            history, "length_mean", "Completion length", "tokens", "Mean over trained groups."
        ),
    ]
    parts = [
        _head(config, summary),
        _tiles(config, history, summary),
        _figures("Does it learn?", main),
        _figures("For whom?", kinds),
        _figures("What was chosen", selection),
        f'<div class="grid" style="margin-top:16px">{_reasons(history)}{_accounts(summary)}</div>',
        _figures("Time", [plots.phases(history)], extra=_rates(history, summary)),
        _figures("The learner", learner, three=True),
        _config(run),
    ]
    return PAGE.format(
        title=f"Reprise: {escape(summary['run_id'])}", css=CSS, body="\n".join(parts)
    )


def _head(config: Config, summary: dict[str, Any]) -> str:
    end = summary["end"]
    state = "did not come to its end" if end is None else end["reason"].replace("_", " ")
    detail = f": {escape(end['detail'])}" if end and end["detail"] else ""
    lag = config.run.max_lag
    policy = "strictly on-policy" if lag == 0 else f"at most {lag} steps off-policy"
    return (
        f"<h1>{escape(summary['run_id'])}</h1>"
        f'<p class="soft">{escape(state)}{detail} · strategy {escape(config.strategy.name)} · '
        f"{policy} · {config.run.prompts_per_step} prompts × {config.rollout.group_size} rollouts "
        f"a step · seed {config.run.seed} · base {escape(summary['base_model'])}</p>"
    )


def _tiles(config: Config, history: History, summary: dict[str, Any]) -> str:
    tiles = []
    kind, accuracy, sampled = (
        summary["held_out_accuracy_kind"],
        summary["held_out_accuracy"],
        summary["sampled"],
    )
    if kind:
        label = "held-out accuracy, " + ("exact" if kind == "exact" else f"mean@{sampled['n']}")
        tiles.append(_change_tile(label, accuracy))
    if kind == "exact":
        tiles.append(_change_tile(f"sampled, mean@{sampled['n']}", sampled, _spread(sampled)))
    if summary["greedy_accuracy"]["before"] is not None:
        tiles.append(_change_tile("greedy accuracy", summary["greedy_accuracy"]))
    pace = "" if not history.done else f"{summary['rollouts'] / history.done:.0f} a step"
    tiles.append(_tile(f"{summary['rollouts']:,}", "rollouts", pace))
    seconds = summary["seconds"]
    training = "–" if seconds["training"] is None else clock_text(seconds["training"])
    steps = f"{summary['steps']} steps; {clock_text(seconds['wall'])} in all"
    tiles.append(_tile(training, "training time", steps))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _change_tile(label: str, values: dict[str, Any], more: str = "") -> str:
    before, after = values["before"], values["after"]
    note = ""
    if before is not None and after is not None:
        way = "up" if after >= before else "down"
        note = f'<span class="{way}">{after - before:+.3f}</span>'
    return _tile(f"{number(before)} → {number(after)}", label, f"{note} {more}")


def _tile(value: str, label: str, note: str = "") -> str:
    return (
        f'<div class="card tile"><span class="label">{escape(label)}</span><b>{value}</b>'
        f'<span class="small soft">{note}&nbsp;</span></div>'
    )


def _spread(sampled: dict[str, Any]) -> str:
    errors = sampled["standard_error"]
    if errors["before"] is None or errors["after"] is None:
        return ""
    return f"(SE {max(errors['before'], errors['after']):.3f})"


def _figures(
    title: str, figures: Iterable[Plot | None], *, three: bool = False, extra: str = ""
) -> str:
    cards = [_figure(figure) for figure in figures if figure is not None]
    if extra:
        cards.append(extra)
    if not cards:
        return ""
    kind = "grid three" if three else "grid"
    return f'<h2>{escape(title)}</h2><div class="{kind}">{"".join(cards)}</div>'


def _figure(plot: Plot) -> str:
    return (
        f'<figure class="card" role="group" aria-label="{escape(plot.title)}">'
        f"<h3>{escape(plot.title)}</h3>"
        f'<figcaption>{escape(plot.note)}<span class="hidden"> {escape(plot.alt)}</span>'
        f"</figcaption>{plot.svg}</figure>"
    )


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


def _accounts(summary: dict[str, Any]) -> str:
    accounts = summary["accounts"]
    if accounts is None:
        return ""
    rows = [
        _row([name.replace("_", " "), ENDS.get(name, ""), f"{count:,}"])
        for name, count in accounts["ends"].items()
        if count
    ]
    kinds = ", ".join(
        f"{count:,} {name.replace('_', ' ')}" for name, count in accounts["zero_variance"].items()
    )
    rows.append(_row(["in flight", "without an end yet", f"{accounts['in_flight']:,}"]))
    rows.append(_row(["issued", "the sum of the above", f"{accounts['issued']:,}"], total=True))
    note = "Every issued task ends exactly once."
    note += f" Zero variance: {kinds}." if kinds else ""
    note += f" Impure groups trained: {summary['impure_groups_trained']}."
    return _table("Accounts", note, ["end", "meaning", "#tasks"], rows)


def _reasons(history: History) -> str:
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


def _rates(history: History, summary: dict[str, Any]) -> str:
    rates = summary["tokens_per_second"]
    last = history.steps[-1] if history.steps else None
    rows = [
        ("tokens sampled a second, actors generating", _rate(rates["actor"])),
        ("tokens trained a second, learner training", _rate(rates["learner"])),
    ]
    if last is not None:
        rows += [
            ("rollout tokens", f"{last.rollout_tokens:,}"),
            ("different problems visited", f"{last.distinct_problems:,}"),
            ("most visits of one problem", f"{last.most_visits:,}"),
        ]
        lag: dict[str, int] = {}
        for step in history.steps:
            for age, groups in step.lag.items():
                lag[age] = lag.get(age, 0) + groups
        rows += [(f"groups trained at lag {age}", f"{n:,}") for age, n in sorted(lag.items())]
    return _table(
        "Rates and counts",
        "Over the whole run.",
        ["figure", "#value"],
        [_row(row, texts=1) for row in rows],
    )


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _config(run: RunDir) -> str:
    text = escape(run.config.read_text(encoding="utf-8"))
    return (
        f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{text}</pre></details>"
    )
