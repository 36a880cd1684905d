"""The figures of the report, as SVG text that takes the colours of the page.

Invariant: every figure has axis labels with units and says in words what it shows; what was not
recorded is left out, never drawn as zero.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from deploy.local.exact import ExactFigures
from deploy.local.history import History, centred, smooth
from deploy.local.summary import by_stratum
from protocol.records import EvalRecord

BLUE, ORANGE, GREEN, RED, PURPLE, GREY = (
    "#3b7dd8",
    "#e08b2c",
    "#3a9d6e",
    "#d1495b",
    "#8a6fc0",
    "#8d99a6",
)
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, "#4aa3a2", "#b5838d", "#6b705c")
# Phases in which a process only waits.
IDLE = {
    "wait": "#b4bcc5",
    "idle": "#b4bcc5",
    "starting": "#ccd2d8",
    "waiting_for_weights": "#98a3ae",
}
# Stand-ins that become the page's own colours, so that figures follow light and dark.
INK, FAINT = "#010203", "#040506"
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "legend.borderaxespad": 0,
    "lines.linewidth": 1.8,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
WIDE, TALL = 5.6, 3.1


@dataclass(frozen=True)
class Plot:
    """One figure of the report."""

    title: str
    note: str
    """What to know when reading it."""
    alt: str
    """The figure in words."""
    svg: str


def accuracy(
    evals: Sequence[EvalRecord], before: ExactFigures | None, after: ExactFigures | None
) -> Plot | None:
    """Held-out accuracy against rollouts."""
    if not evals:
        return None

    def paint(axes: Axes) -> None:
        points = [e for e in evals if e.mean is not None]
        x = [e.rollouts for e in points]
        mean = [e.mean or 0.0 for e in points]
        error = [e.standard_error or 0.0 for e in points]
        low = [m - e for m, e in zip(mean, error, strict=True)]
        high = [m + e for m, e in zip(mean, error, strict=True)]
        axes.fill_between(x, low, high, color=BLUE, alpha=0.2, lw=0)
        axes.plot(x, mean, color=BLUE, marker="o", ms=4, label=f"mean@{evals[0].n} ± SE")
        _line(axes, evals, "passed", GREEN, f"pass@{evals[0].n}")
        _line(axes, evals, "greedy", GREY, "greedy")
        if before is not None and after is not None:
            axes.plot(
                [evals[0].rollouts, evals[-1].rollouts],
                [before.mean, after.mean],
                ls="none",
                marker="D",
                ms=6,
                mfc="none",
                mec=RED,
                mew=1.6,
                clip_on=False,
                zorder=5,
                label="exact",
            )
        axes.set_ylim(0, 1)
        _rollouts(axes)
        axes.set_ylabel("accuracy")
        _legend(axes)

    first, last = evals[0], evals[-1]
    return Plot(
        f"Held-out accuracy ({first.name})",
        "Sampled at the evaluation's temperature; diamonds are exact, without sampling."
        if before is not None
        else "Sampled at the evaluation's temperature.",
        f"mean@{first.n} goes from {_say(first.mean)} to {_say(last.mean)} over {last.rollouts:,} "
        "rollouts.",
        draw(paint),
    )


def _line(axes: Axes, evals: Sequence[EvalRecord], name: str, colour: str, label: str) -> None:
    points = [(e.rollouts, getattr(e, name)) for e in evals if getattr(e, name) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", ms=3, lw=1.2, label=label)


def reward(history: History) -> Plot | None:
    """Reward of trained groups and of exploration draws against rollouts."""
    steps = history.steps
    if not steps:
        return None
    x = [s.rollouts for s in steps]
    trained = [s.reward_trained for s in steps]
    explored = [s.reward_explored for s in steps]

    def paint(axes: Axes) -> None:
        for values, colour, label in (
            (explored, ORANGE, "exploration draws: unbiased"),
            (trained, GREY, "trained groups: held near ½ by selection"),
        ):
            _dots_and_mean(axes, x, values, colour, label)
        _rollouts(axes)
        axes.set_ylabel("mean reward")
        _legend(axes)

    return Plot(
        "Reward",
        "Reward over trained groups is held near ½ by selection, not progress; exploration draws "
        "are uniform over the problems and unbiased. Lines are means over 21 steps, centred.",
        f"Mean reward of exploration draws: {_say(_last(explored))} at the end; of trained groups: "
        f"{_say(_last(trained))}.",
        draw(paint),
    )


def zero_variance(history: History) -> Plot | None:
    """Share of zero-variance groups, and of replays, over steps."""
    steps = history.steps
    if not steps:
        return None
    x = [s.version.step + 1 for s in steps]
    shares = [s.zero_variance_share for s in steps]
    replays = [s.replay_share for s in steps]

    def paint(axes: Axes) -> None:
        _dots_and_mean(axes, x, shares, RED, "zero-variance groups, before filtering")
        _dots_and_mean(axes, x, replays, BLUE, "picks seen before")
        axes.set_ylim(0, 1)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("share")
        _legend(axes)

    return Plot(
        "Groups without variance, and replays",
        "A group whose rewards are all equal teaches nothing and still costs its rollouts.",
        f"Share of zero-variance groups: {_say(_first(shares))} at first, {_say(_last(shares))} "
        f"over the last 20 steps; of replayed picks: {_say(_last(replays))} at the end.",
        draw(paint),
    )


def pools(history: History) -> Plot | None:
    """Sizes of the scheduler's pools, stacked."""
    steps = history.steps
    names = list(dict.fromkeys(name for s in steps for name in s.pools))
    if not names:
        return None

    def paint(axes: Axes) -> None:
        x = [s.version.step + 1 for s in steps]
        stacks = [[s.pools.get(name, 0) for s in steps] for name in names]
        labels = [name.replace("_", " ") for name in names]
        axes.stackplot(x, stacks, labels=labels, colors=CYCLE, alpha=0.85, lw=0)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("problems")
        axes.margins(x=0, y=0)
        _legend(axes)

    last = ", ".join(f"{name.replace('_', ' ')} {size:,}" for name, size in steps[-1].pools.items())
    return Plot(
        "Where the problems are",
        "Every training problem lies in one of the scheduler's pools.",
        f"At the end: {last}.",
        draw(paint),
    )


def phases(history: History) -> Plot | None:
    """Seconds by phase: what the scheduler waited for, the learner, the actors."""
    rows = phase_seconds(history)
    if not rows:
        return None

    def paint(axes: Axes) -> None:
        busy: dict[str, str] = {}
        for row, phase_of in rows.items():
            left = 0.0
            for phase, seconds in phase_of.items():
                name = phase.replace("_", " ")
                colour = IDLE.get(phase) or busy.setdefault(phase, CYCLE[len(busy) % len(CYCLE)])
                known = name in axes.get_legend_handles_labels()[1]
                axes.barh(row, seconds, 0.6, left, color=colour, label=None if known else name)
                left += seconds
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")
        _legend(axes)

    longest = {row: max(p, key=lambda name: p[name]) for row, p in rows.items()}
    said = "; ".join(
        f"{row}: mostly {phase.replace('_', ' ')} ({rows[row][phase]:.0f} s)"
        for row, phase in longest.items()
    )
    return Plot(
        "Where the time went",
        "A step waits for rollouts, for the learner, or for an evaluation; below it, what the "
        "learner and each actor did meanwhile.",
        said + ".",
        draw(paint, height=max(2.0, 1.3 + 0.42 * len(rows))),
    )


def phase_seconds(history: History) -> dict[str, dict[str, float]]:
    """Seconds of the whole run by process and phase; phases without time are left out."""
    rows: dict[str, dict[str, float]] = {"step": {}, "learner": {}}
    for step in history.steps:
        for name, seconds in step.waited.items():
            rows["step"][f"for {name}"] = rows["step"].get(f"for {name}", 0.0) + seconds
        for name, seconds in step.learner.items():
            if name.startswith("seconds_"):
                phase = name.removeprefix("seconds_")
                rows["learner"][phase] = rows["learner"].get(phase, 0.0) + seconds
    if history.end is not None:
        for actor, figures in history.end.actors.items():
            rows[actor] = {k: v for k, v in figures.items() if k not in ("tokens", "tasks")}
    return {
        row: kept for row, p in rows.items() if (kept := {k: v for k, v in p.items() if v > 0.05})
    }


def strata(before: ExactFigures | None, after: ExactFigures | None) -> Plot | None:
    """Exact accuracy by stratum, before and after."""
    figures = by_stratum(before, after)
    if not figures:
        return None
    rows = {
        f"{name} ({f['problems']})": (float(f["before"]), float(f["after"]))
        for name, f in figures.items()
    }
    return Plot(
        "Accuracy by where a problem began",
        "Exact, on held-out problems. Solved always: ≥ .9 before training; often: ≥ .5; seldom: "
        "≥ .01; never: below.",
        _changes(rows),
        draw(lambda axes: _before_after(axes, rows), height=0.9 + 0.5 * len(rows)),
    )


def sources(
    evals: Sequence[EvalRecord], before: ExactFigures | None, after: ExactFigures | None
) -> Plot | None:
    """Accuracy by data source, before and after; exact where there are exact figures."""
    if before is not None and after is not None:
        kind = "Exact"
        pairs = {
            name: (value, after.by_data_source[name])
            for name, value in before.by_data_source.items()
        }
    else:
        kind = "Sampled"
        pairs = _sampled_sources(evals)
    if len(pairs) < 2:
        return None
    rows = {name or "(none)": pair for name, pair in sorted(pairs.items())}
    return Plot(
        "Accuracy by data source",
        f"{kind}, on held-out problems, before and after training.",
        _changes(rows),
        draw(lambda axes: _before_after(axes, rows), height=0.9 + 0.4 * len(rows)),
    )


def _sampled_sources(evals: Sequence[EvalRecord]) -> dict[str, tuple[float, float]]:
    if not evals:
        return {}
    pairs = {}
    for name, first in evals[0].by_source.items():
        start, end = first.get("mean"), evals[-1].by_source.get(name, {}).get("mean")
        if start is not None and end is not None:
            pairs[name] = (start, end)
    return pairs


def _before_after(axes: Axes, rows: dict[str, tuple[float, float]]) -> None:
    names = list(rows)
    for y, name in enumerate(names):
        start, end = rows[name]
        axes.plot([start, end], [y, y], color=GREY, lw=1.5, alpha=0.7, zorder=1)
        axes.annotate(
            f"{end - start:+.2f}",
            (max(start, end), y),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
        )
    y_all = range(len(names))
    axes.scatter([rows[n][0] for n in names], y_all, color=GREY, s=38, label="before", zorder=2)
    axes.scatter([rows[n][1] for n in names], y_all, color=BLUE, s=38, label="after", zorder=3)
    axes.set_yticks(list(y_all), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(-0.03, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("accuracy")
    _legend(axes)


def learner(history: History, name: str, title: str, label: str, note: str) -> Plot | None:
    """One of the learner's numbers over steps."""
    points = [(s.version.step + 1, s.learner[name]) for s in history.steps if name in s.learner]
    if not points:
        return None
    x, values = [p[0] for p in points], [p[1] for p in points]

    def paint(axes: Axes) -> None:
        _dots_and_mean(axes, x, values, PURPLE, None)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)

    return Plot(
        title,
        note,
        f"{title}: {values[0]:.3g} at first, {_say(_last(values))} over the last 20 steps.",
        draw(paint, width=3.7, height=2.4),
    )


def _dots_and_mean(
    axes: Axes,
    x: Sequence[float],
    values: Sequence[float | None],
    colour: str,
    label: str | None,
) -> None:
    points = [(a, b) for a, b in zip(x, values, strict=True) if b is not None]
    means = [(a, b) for a, b in zip(x, centred(values), strict=True) if b is not None]
    if points:
        axes.scatter(*zip(*points, strict=True), s=7, color=colour, alpha=0.4, lw=0)
        axes.plot(*zip(*means, strict=True), color=colour, label=label)


def _rollouts(axes: Axes) -> None:
    axes.set_xlabel("rollouts")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(lambda value, _: _thousands(value))


def _thousands(value: float) -> str:
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _legend(axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        columns = 2 if max(map(len, labels)) > 16 else 4
        axes.figure.legend(handles, labels, loc="outside upper left", ncols=columns)


def draw(paint: Callable[[Axes], None], width: float = WIDE, height: float = TALL) -> str:
    """Paint one pair of axes; returns an <svg> element that scales to its place."""
    with mpl.rc_context({**STYLE, "axes.prop_cycle": mpl.cycler(color=CYCLE)}):
        figure = Figure(figsize=(width, height), layout="constrained")
        paint(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--faint)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The page sizes it and sets its font.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", "inherit", svg)
    return svg.replace("<svg ", '<svg aria-hidden="true" ', 1)


def _say(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def _first(values: Sequence[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _last(values: Sequence[float | None]) -> float | None:
    means = smooth(values)
    return means[-1] if means else None


def _changes(rows: dict[str, tuple[float, float]]) -> str:
    return "; ".join(f"{name}: {a:.3f} → {b:.3f}" for name, (a, b) in rows.items()) + "."
