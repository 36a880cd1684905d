"""The figures of the report.

Invariant: every figure has axis labels with units and says in words what it shows; what was not
recorded is left out, never drawn as zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from deploy.local.exact import ExactFigures
from deploy.local.history import History, smooth
from deploy.local.summary import by_stratum
from deploy.local.svg import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    dots_and_mean,
    draw,
    legend,
    rollouts,
)
from protocol.records import EvalRecord

# Phases in which a process only waits.
IDLE = {
    "wait": "#b4bcc5",
    "idle": "#b4bcc5",
    "starting": "#ccd2d8",
    "waiting_for_weights": "#98a3ae",
}
MOST_ACTOR_ROWS = 8


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
        rollouts(axes)
        axes.set_ylabel("accuracy")
        legend(axes)

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
            dots_and_mean(axes, x, values, colour, label)
        rollouts(axes)
        axes.set_ylabel("mean reward")
        legend(axes)

    return Plot(
        "Reward",
        "Reward over trained groups is held near ½ by selection, not progress; exploration draws "
        "are uniform over the problems and unbiased. Lines are running means.",
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
        dots_and_mean(axes, x, shares, RED, "zero-variance groups, before filtering")
        dots_and_mean(axes, x, replays, BLUE, "picks seen before")
        axes.set_ylim(0, 1)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("share")
        legend(axes)

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
        legend(axes)

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
        legend(axes)

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
    rows |= _actor_seconds(history)
    return {
        row: kept for row, p in rows.items() if (kept := {k: v for k, v in p.items() if v > 0.05})
    }


def _actor_seconds(history: History) -> dict[str, dict[str, float]]:
    actors = {} if history.end is None else history.end.actors
    by_state = {
        actor: {k: v for k, v in figures.items() if k not in ("tokens", "tasks")}
        for actor, figures in actors.items()
    }
    if len(by_state) <= MOST_ACTOR_ROWS:
        return by_state
    states = dict.fromkeys(state for seconds in by_state.values() for state in seconds)
    mean = {s: sum(a.get(s, 0.0) for a in by_state.values()) / len(by_state) for s in states}
    return {f"mean of {len(by_state)} actors": mean}


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
        "Exact, on held-out problems, grouped by how often each was solved before training; in "
        "brackets the number of problems.",
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
            f"{end - start:+.2f}".replace("-0.00", "+0.00"),
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
    legend(axes)


def learner(history: History, name: str, title: str, label: str, note: str) -> Plot | None:
    """One of the learner's numbers over steps."""
    points = [(s.version.step + 1, s.learner[name]) for s in history.steps if name in s.learner]
    if not points:
        return None
    x, values = [p[0] for p in points], [p[1] for p in points]

    def paint(axes: Axes) -> None:
        dots_and_mean(axes, x, values, PURPLE, None)
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(label)

    return Plot(
        title,
        note,
        f"{title}: {values[0]:.3g} at first, {_say(_last(values))} over the last 20 steps.",
        draw(paint, width=3.7, height=2.4),
    )


def _say(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3g}"


def _first(values: Sequence[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _last(values: Sequence[float | None]) -> float | None:
    means = smooth(values)
    return means[-1] if means else None


def _changes(rows: dict[str, tuple[float, float]]) -> str:
    return "; ".join(f"{name}: {a:.3f} → {b:.3f}" for name, (a, b) in rows.items()) + "."
