"""`reprise run`: one run from the checked config to the report.

Invariant: whatever happens, every process that was started has ended when `launch` returns, and the
run directory holds what there is to see.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from deploy.local import environment
from deploy.local.broker import BrokerStartError, EmbeddedBroker
from deploy.local.exact import (
    ExactError,
    ExactFigures,
    ExactPass,
    obstacle,
    write_problems,
)
from deploy.local.history import History
from deploy.local.observer import Observer
from deploy.local.outcome import how_to_go_on, result_lines
from deploy.local.report import ReportError, write_report
from deploy.local.summary import summarise, write_summary
from deploy.local.supervisor import (
    ChildDied,
    Deadlines,
    StoppedByUser,
    StopSignals,
    Supervisor,
)
from deploy.local.view import make_view
from protocol.config import EMBEDDED_FETCH_WAIT, Config, dump_config
from protocol.kafka import BrokerError, Kafka
from protocol.rundir import RunDir, RunIdentity
from protocol.topics import TopicError, create_or_verify, require_empty

RUN_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")
GOOD_ENDS = ("finished", "stopped", "nothing_left_to_learn")
OK, ERROR, BAD_INPUT = 0, 1, 2


class StartError(Exception):
    """The run cannot start. One line that says why and what to do."""


def make_run_dir(config: Config, run_id: str | None) -> RunDir:
    """Make `<run.dir>/<run id>`. Raises StartError."""
    if run_id is not None and not RUN_ID.fullmatch(run_id):
        raise StartError(
            f"--run-id: {run_id!r} does not fit into topic names; use up to 96 of a-z, 0-9, '.', "
            "'_' and '-', the first a letter or digit"
        )
    chosen = run_id or f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    run = RunDir(config.run.dir / chosen)
    try:
        run.create(RunIdentity(chosen, 1))
    except FileExistsError:
        raise StartError(f"{run.root}: exists already; take another --run-id") from None
    except OSError as error:
        raise StartError(f"run.dir: {run.root}: cannot be made: {error.strerror}") from None
    return run


def launch(config: Config, command: Sequence[str], run_id: str | None, *, live: bool) -> int:
    """Run it. Returns the exit code; raises StartError.

    `config` has passed `check`; `command` is what a user types to start such a run.
    """
    started = time.monotonic()
    if config.metrics.port:
        raise StartError(
            f"metrics.port: {config.metrics.port} cannot be the port of every process on one "
            "machine; use 0, which gives each a free one"
        )
    run = make_run_dir(config, run_id)
    with StopSignals() as signals, contextlib.ExitStack() as stack:
        try:
            broker = _broker(config, run, stack)
            resolved = _resolved(config, broker)
            dump_config(resolved, run.config)
            asyncio.run(_topics(resolved, run))
        except (BrokerStartError, BrokerError, TopicError) as error:
            raise StartError(str(error)) from None
        running = _Running(resolved, command, run, signals, broker, live, started)
        return running.run(stack)


def _broker(config: Config, run: RunDir, stack: contextlib.ExitStack) -> EmbeddedBroker | None:
    if not config.kafka.embedded:
        return None
    return stack.enter_context(EmbeddedBroker(run.logs / "broker.log"))


def _resolved(config: Config, broker: EmbeddedBroker | None) -> Config:
    """With the address of the broker, and what an embedded one cannot do switched off."""
    if broker is None:
        return config
    update = {
        "bootstrap_servers": broker.bootstrap_servers,
        "idempotence": False,
        "replication_factor": 1,
        "fetch_wait": config.kafka.fetch_wait or EMBEDDED_FETCH_WAIT,
    }
    return config.model_copy(update={"kafka": config.kafka.model_copy(update=update)})


async def _topics(config: Config, run: RunDir) -> None:
    kafka = Kafka(config.kafka, wait=config.waits.kafka, client_id="reprise-launcher")
    specs = run.identity.topics.specs(config)
    admin = await kafka.admin()
    try:
        await create_or_verify(admin, specs)
        consumer = await kafka.consumer()
        try:
            await require_empty(consumer, specs)
        finally:
            await consumer.stop()
    finally:
        await admin.close()


@dataclass
class _Running:
    """A run whose topics are ready."""

    config: Config
    command: Sequence[str]
    run_dir: RunDir
    signals: StopSignals
    broker: EmbeddedBroker | None
    live: bool
    started: float

    def run(self, stack: contextlib.ExitStack) -> int:
        """Start, watch, measure, report."""
        before = self._exact("before", Path(self.config.model.path), stack)
        code, stopped = self._train()
        history = History.read(self.run_dir.metrics)
        figures_before, figures_after = self._figures(before, stack)
        summary = summarise(
            self.config,
            self.run_dir,
            history,
            before=figures_before,
            after=figures_after,
            wall_seconds=time.monotonic() - self.started,
        )
        write_summary(self.run_dir, summary)
        if history.steps or history.evals:
            with _reported(print):
                write_report(self.run_dir)
            for line in result_lines(summary, self.run_dir):
                print(line)
        if stopped:
            print(how_to_go_on(self.run_dir, self.command))
        end = history.end
        if code == OK and (end is None or end.reason not in GOOD_ENDS):
            print("the run did not end well: " + (end.detail if end else "no end was recorded"))
            return ERROR
        return code

    def _train(self) -> tuple[int, bool]:
        """Exit code so far, and whether the run was cut short."""
        specs = environment.specs(self.config, self.run_dir, os.environ)
        names = [spec.name for spec in specs]
        observer = Observer(self.run_dir, names, host=self.config.metrics.host)
        view = make_view(self.config, observer, Console(), live=self.live)
        broker = self.broker
        supervisor = Supervisor(
            self.run_dir,
            Deadlines.of(self.config.waits),
            self.signals,
            say=view.say,
            tick=view.refresh,
            over=lambda: History.read(self.run_dir.metrics).end is not None,
            broker=lambda: None if broker is None else broker.poll(),
        )
        print(f"run {self.run_dir.identity.run} in {self.run_dir.root}; logs in logs/", flush=True)
        failure = ""
        with view:
            try:
                observer.start()
                supervisor.start(specs)
                supervisor.watch()
                return OK, False
            except StoppedByUser as stop:
                return stop.exit_code, True
            except ChildDied as error:
                failure = str(error)
                return ERROR, True
            finally:
                supervisor.close()
                observer.stop()
                if failure:
                    view.say(failure)

    def _exact(self, when: str, model: Path, stack: contextlib.ExitStack) -> ExactPass | None:
        if obstacle(self.config) or write_problems(self.config, self.run_dir) is None:
            return None
        exact = ExactPass.start(self.config, self.run_dir, when, model)
        stack.callback(exact.stop)
        return exact

    def _figures(
        self, before: ExactPass | None, stack: contextlib.ExitStack
    ) -> tuple[ExactFigures | None, ExactFigures | None]:
        """Exact figures before and after; None where they do not apply or could not be had."""
        if before is None or not (self.run_dir.model / "config.json").is_file():
            return None, None
        print("measuring the exact held-out accuracy …", flush=True)
        stops = self.signals.count
        try:
            after = self._exact("after", self.run_dir.model, stack)
            assert after is not None
            both = before, after
            first, last = (p.result(cancelled=lambda: self.signals.count > stops) for p in both)
            return first, last
        except ExactError as error:
            print(f"{error}\nthe sampled accuracy stands instead", flush=True)
            return None, None


@contextlib.contextmanager
def _reported(write: Callable[[str], None]) -> Iterator[None]:
    try:
        yield
    except ReportError as error:
        write(f"no report: {error}")
