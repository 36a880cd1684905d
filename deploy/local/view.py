"""What a person sees while a run goes on: one live picture in a terminal, plain lines elsewhere.

Invariant: a view only shows; an error in it is logged and the run goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from deploy.local.history import WINDOW, History, smooth
from deploy.local.observer import UNKNOWN_STATES, Observer, ProcessFacts
from protocol.config import Config
from protocol.records import EvalRecord, StepRecord

log = logging.getLogger(__name__)

LINES_EVERY_STEPS = 10
SILENCE_SECONDS = 60.0


class View(Protocol):
    """Either kind of view."""

    def say(self, text: str) -> None:
        """One line that stays."""

    def refresh(self) -> None:
        """Show what is new; called often."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...


def make_view(config: Config, observer: Observer, console: Console, *, live: bool) -> View:
    """The live view where wanted and the console is a terminal, plain lines otherwise."""
    if live and console.is_terminal:
        return LiveView(config, observer, console)
    return PlainView(config, observer, lambda text: print(text, flush=True))


class PlainView:
    """One line about every ten steps, one for each evaluation, one a minute when nothing ends."""

    def __init__(
        self,
        config: Config,
        observer: Observer,
        write: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._observer = observer
        self._write = write
        self._clock = clock
        self._steps = 0
        self._evals = 0
        self._last = clock()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()

    def say(self, text: str) -> None:
        """Write a line."""
        self._last = self._clock()
        self._write(text)

    def refresh(self) -> None:
        """Write the lines that have become due."""
        try:
            self._write_new(self._observer.history)
        except Exception:
            log.warning("the view failed", exc_info=True)

    def _write_new(self, history: History) -> None:
        total = self._config.run.steps
        for record in history.evals[self._evals :]:
            self._evals += 1
            self.say(eval_line(record, total))
        while self._steps < history.done:
            self._steps += 1
            if self._steps % LINES_EVERY_STEPS == 0 or self._steps in (1, total):
                self.say(step_line(history, self._steps, total))
        if self._clock() - self._last > SILENCE_SECONDS:
            states = (
                f"{p.name} {shown_state(p)}"
                + (f" {p.seconds:.0f} s" if p.seconds is not None else "")
                for p in self._observer.processes.values()
            )
            self.say(f"{_counter(self._steps, total)}  " + ", ".join(states))


def eval_line(record: EvalRecord, total: int) -> str:
    """One evaluation in one line."""
    failed = f", {record.failed} failed" if record.failed else ""
    spread = "" if record.standard_error is None else f" ± {record.standard_error:.3f}"
    return (
        f"{_counter(record.version.step, total)}  {record.name}: mean@{record.n} "
        f"{number(record.mean)}{spread}  pass@{record.n} {number(record.passed)}  "
        f"greedy {number(record.greedy)}  ({record.problems} problems{failed})"
    )


def step_line(history: History, done: int, total: int) -> str:
    """The last steps in one line."""
    steps = history.steps[:done]
    last = steps[-1]
    seen, recent = History(steps=steps), steps[-5 * WINDOW :]
    parts = [
        _counter(done, total),
        f"reward {number(smooth([s.reward_trained for s in recent])[-1])}",
        f"zero variance {number(smooth([s.zero_variance_share for s in recent])[-1])}",
        f"trained {last.trained}/{last.planned}",
        f"{last.rollouts:,} rollouts",
    ]
    if (rate := seen.tokens_per_second()) is not None:
        parts.append(f"{rate:,.0f} tok/s")
    if done < total and (eta := _eta(seen, total)) is not None:
        parts.append(f"ETA {clock_text(eta)}")
    return "  ".join(parts)


class LiveView:
    """One picture, redrawn in place."""

    def __init__(self, config: Config, observer: Observer, console: Console) -> None:
        self._config = config
        self._observer = observer
        self._started = time.monotonic()
        self._live = Live(
            get_renderable=self._draw, console=console, refresh_per_second=4, transient=False
        )

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line above the picture."""
        self._live.console.print(text, markup=False, highlight=False)

    def refresh(self) -> None:
        """Redraws itself."""

    def _draw(self) -> RenderableType:
        try:
            return draw(self._config, self._observer, time.monotonic() - self._started)
        except Exception:
            log.debug("the view failed", exc_info=True)
            return Text("(the view failed; the run goes on)")


def draw(config: Config, observer: Observer, elapsed: float) -> RenderableType:
    """The picture of this moment."""
    history = observer.history
    parts: list[RenderableType] = [
        _head(config, history, elapsed),
        Text(),
        _figures(config, history),
        Text(),
        _processes(observer),
    ]
    if observer.warnings:
        lines = Text("\n".join(f"! {line}" for line in observer.warnings), style="yellow")
        lines.no_wrap, lines.overflow = True, "ellipsis"
        parts += [Text(), lines]
    return Group(*parts)


def _head(config: Config, history: History, elapsed: float) -> RenderableType:
    total = config.run.steps
    eta = _eta(history, total)
    head = Table.grid(padding=(0, 2), expand=True)
    head.add_column(no_wrap=True)
    head.add_column(ratio=1)
    head.add_column(no_wrap=True, justify="right")
    head.add_row(
        f"[bold]step {history.done}/{total}[/]",
        ProgressBar(
            total=total,
            completed=history.done,
            style="grey37",
            complete_style="cyan",
            finished_style="green",
        ),
        f"{clock_text(elapsed)} elapsed   ETA {'–' if eta is None else clock_text(eta)}",
    )
    return head


def _figures(config: Config, history: History) -> RenderableType:
    steps = history.steps
    grid = Table.grid(padding=(0, 3))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for name in [e.name for e in config.eval]:
        records = history.evals_of(name)
        trail = " → ".join(number(r.mean) for r in [*records[:1], *records[1:][-4:]])
        at = f"   at step {records[-1].version.step}" if records else ""
        grid.add_row(f"{name} accuracy", f"[bold green]{trail or '–'}[/]{at}")
    grid.add_row("reward, trained groups", _mean(steps, "reward_trained") + "   (held near ½)")
    grid.add_row("reward, exploration", _mean(steps, "reward_explored"))
    grid.add_row("zero-variance groups", _mean(steps, "zero_variance_share"))
    if steps:
        last = steps[-1]
        grid.add_row("pools", "   ".join(f"{k} {v:,}" for k, v in last.pools.items()))
        rate = history.tokens_per_second()
        pace = "–" if rate is None else f"{rate:,.0f} tok/s"
        grid.add_row("rollouts", f"{last.rollouts:,}   {pace}")
        ends = {k: v for k, v in last.accounts.ends.items() if v}
        grid.add_row("tasks", _accounts(last.accounts.issued, last.accounts.in_flight, ends))
    return grid


def _accounts(issued: int, in_flight: int, ends: dict[str, int]) -> str:
    listed = "   ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in ends.items())
    return f"{issued:,} issued   {in_flight} in flight   {listed}"


def _processes(observer: Observer) -> RenderableType:
    table = Table.grid(padding=(0, 3))
    for style in ("dim", "", "", "dim"):
        table.add_column(style=style, no_wrap=True)
    for facts in observer.processes.values():
        seconds = "" if facts.seconds is None else f"{facts.seconds:.0f} s"
        version = f"weights {facts.version}" if facts.version else ""
        table.add_row(facts.name, shown_state(facts), seconds, version)
    return table


def shown_state(facts: ProcessFacts) -> str:
    """What a process does now, in words; the scheduler's state is what it waits for."""
    state = facts.state.replace("_", " ")
    if facts.name == "scheduler" and state not in (*UNKNOWN_STATES, ""):
        return f"waiting for {state}"
    return state or "leaving"


def _mean(steps: list[StepRecord], field: str) -> str:
    values = smooth([getattr(step, field) for step in steps[-5 * WINDOW :]])
    return number(values[-1] if values else None)


def _eta(history: History, total: int) -> float | None:
    pace = history.seconds_per_step()
    return None if pace is None else pace * max(0, total - history.done)


def _counter(done: int, total: int) -> str:
    return f"step {done:>{len(str(total))}}/{total}"


def number(value: float | None) -> str:
    """Three decimals, or a dash for what is not there."""
    return "–" if value is None else f"{value:.3f}"


def clock_text(seconds: float) -> str:
    """h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
