"""`report.html`: one page, without any outside file, that shows what a run did.

Invariant: made from the run directory alone, so that it can be made again at any time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING, Any

from deploy.local.exact import read_figures
from deploy.local.history import History
from deploy.local.page import CSS, PAGE
from deploy.local.tables import accounts, rates, reasons
from deploy.local.view import clock_text, number
from protocol.config import Config, load_config
from protocol.rundir import RunDir, write_atomic

if TYPE_CHECKING:
    from deploy.local.plots import Plot


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
        f'<div class="grid" style="margin-top:16px">{reasons(history)}{accounts(summary)}</div>',
        _figures("Time", [plots.phases(history)], extra=rates(history, summary)),
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
    training = "–" if summary["seconds"] is None else clock_text(summary["seconds"])
    steps = f"{summary['steps']} steps; {clock_text(summary['wall_seconds'])} in all"
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


def _config(run: RunDir) -> str:
    text = escape(run.config.read_text(encoding="utf-8"))
    return (
        f"<h2>Configuration</h2><details><summary>config.yaml</summary><pre>{text}</pre></details>"
    )
