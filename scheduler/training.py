"""The optimizer steps: which training tasks are issued, how they end, which batch goes out when.

Invariants. Every training task that is issued ends once, through `_end`, which gives its place and
its problem back. At most (L + 1) · prompts_per_step training tasks are open, a released one until
its StepCompleted. Rounds of the steps c … c + L are open at current step c, and none beyond
`run.steps`. A batch is released when the learner is idle, the evaluation of its version is in, no
older group is left behind that would become too old (`scheduler.rounds`), and `prompts_per_step`
groups are ready; or fewer, when the round's refill is spent or the strategy has nothing more to
offer and no task of the round is open.

Stragglers. The wait for late groups is bounded by `straggler_wait` of log time, counted from when
the batch could go without them: enough groups are ready, or every open task of the round is late
(at lag 0 they all are) and at least one group is ready. Then they end `expired`, and the batch goes
without them; only later rounds get replacements. With `on_straggler: drop` they end so at once when
a full batch is ready.

A learner that starts anew (a higher generation) ends every open task `stale`; its version becomes
current and rounds begin anew there. What the strategy has learned stays.
"""

from __future__ import annotations

import hashlib
from typing import Any

from protocol.config import Config
from protocol.messages import BatchGroup, BatchReleased, Outcome, RunEndReason, StepCompleted
from protocol.records import StepRecord
from protocol.versions import Version
from scheduler.accounts import Books, Task
from scheduler.grading import Figures, Grader
from scheduler.report import Report
from scheduler.round import Round
from scheduler.rounds import OpenRounds
from scheduler.strategies.base import Pick
from scheduler.teaching import Teaching

SEED_BITS = 53


def task_seed(*place: object) -> int:
    """A 53-bit number that depends on `place` alone: run seed, round and place in the round."""
    digest = hashlib.blake2b(":".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


class Training:
    """Rounds and batches.

    Attributes:
        version: of the weights that the next batch changes; None before the first LearnerReady.
        teaching: the strategy, and what it is taught.
        report: the figures of the step.
        batch: tasks at the learner, by id, in the order of the batch; None while it is idle.
        short: there may be a place to fill; `fill` looks and makes it False.
        done: the last step is completed.
        over: why the run cannot go on, once it cannot.
        notices: sentences for the user; whoever says them empties the list.
    """

    def __init__(self, config: Config, problems: int, books: Books) -> None:
        self._config = config
        self._run = config.run
        self._books = books
        self._rounds = OpenRounds(config.run.prompts_per_step, config.run.max_lag)
        self.teaching = Teaching(config, problems)
        self._grader = Grader(config.grading)
        self.report = Report()
        self.version: Version | None = None
        self.batch: dict[str, Task] | None = None
        self.short = False
        self.done = False
        self.over: tuple[RunEndReason, str] | None = None
        self.notices: list[str] = []
        self._batch_replays: float | None = None
        self._late_since: float | None = None
        self._empty_rounds = 0
        self._empty_ends: dict[str, int] = {}

    @property
    def ready(self) -> list[Task]:
        """Groups that wait for a batch, in the order of issue."""
        tasks = (task for task in self._rounds.tasks if task.ref is not None)
        return sorted(tasks, key=lambda task: task.number)

    def begin(self, version: Version) -> None:
        """A learner of a new generation is ready at `version`."""
        for task in list(self._books.of_training()):
            self._end(task, "stale", replace=False)
        self._rounds.clear()
        self.teaching.begin(version.step)
        self._arrive(version)
        self.batch = None
        self._late_since = None
        self._empty_rounds, self._empty_ends = 0, {}

    def fill(self) -> list[Task]:
        """Issue tasks for the free places of the open rounds, the earliest round first."""
        self.short = False
        if self.version is None or self.over is not None:
            return []
        issued: list[Task] = []
        step = self.version.step
        # The round of a batch at the learner is closed.
        first = step + (self.batch is not None)
        for s in range(first, min(step + self._run.max_lag, self._run.steps - 1) + 1):
            current = self._rounds.open(s)
            if not current.dry:
                issued += self._fill(current, self.version)
        return issued

    def outcome(self, task: Task, event: Outcome) -> None:
        """The first outcome of an open task: it is ready for a batch, or ends and is replaced."""
        assert self.version is not None
        self._rounds.got(task, event.attempt)
        group = self._figures(task, event)
        self.report.came_in(task, event, group)
        if group is None or event.oldest is None or event.newest is None:
            self._end(task, "failed")
            return
        self.teaching.outcome(task, event.attempt, event.oldest, self.version, group)
        refused = self._refusal(event.oldest, event.newest, self.version)
        if refused is not None:
            self._end(task, refused)
        elif group.zero_variance and not self._run.keep_zero_variance:
            self._end(task, "zero_variance", group.kind)
        elif event.group is None:
            self._end(task, "failed")
        else:
            task.ref, task.oldest, task.reward = event.group, event.oldest, group.reward
            self._rounds.ready += 1

    def give_up(self, task: Task) -> None:
        """No attempt of the task brought an outcome: it ends `expired`, and is replaced."""
        self._end(task, "expired")

    def close(self, task: Task, end: str) -> None:
        """The run ends, and nobody waits for the task any longer."""
        self._end(task, end, replace=False)

    def release(self, now: float, evaluated: bool) -> BatchReleased | None:
        """The next batch, if it may go; gives up late tasks in time, and renews an empty round.

        Args:
            now: log time in seconds.
            evaluated: whether the evaluation due at the current version is in.
        """
        if self.version is None or self.batch is not None or self.done or self.over is not None:
            return None
        step, rounds = self.version.step, self._rounds
        too_old = rounds.too_old(step)
        if (
            self._run.max_lag == 0
            and too_old
            and self._late_since is not None
            and now - self._late_since < self._run.straggler_wait
        ):
            return None  # as when it was looked at last: nothing but time lets this batch go
        size = rounds.size(step, too_old) if evaluated else None
        if size is not None and rounds.held(step, size, too_old):
            if size == 0 or not self._expire_late(now, step, size):
                return None
            size = rounds.size(step, 0)
        self._late_since = None
        if size is None:
            return None
        if size == 0:
            self._renew(self.version)
            return None
        return self._release(size, self.version)

    def complete(self, event: StepCompleted, seconds: float) -> StepRecord:
        """The batch at the learner is done: book the end of each of its groups.

        A group that the event does not name ends `failed`.
        """
        assert self.batch is not None
        batch, self.batch = self.batch, None
        ends = {(each.task, each.attempt): each.end for each in event.ends}
        trained: list[Task] = []
        for task in batch.values():
            end = ends.get((task.id, task.got), "failed")
            if end == "trained":
                trained.append(task)
            self._end(task, end)
        self._arrive(event.version.next_step())
        oldest = event.version.step + 1 - self._run.max_lag
        for task in self.ready:
            if task.oldest is not None and task.oldest.step < oldest:
                self._end(task, "stale")
        return self.report.step(
            event,
            trained,
            seconds=seconds,
            groups=len(batch),
            planned=self._run.prompts_per_step,
            replay_share=self._batch_replays,
            pools=self.teaching.strategy.pools(),
            distinct=self.teaching.distinct,
            most_visits=self.teaching.most_visits,
            accounts=self._books.accounts,
        )

    def waits_for(self, evaluated: bool) -> str:
        """What holds up the next batch: `learner`, `evaluation` or `rollouts`."""
        if self.batch is not None or self.version is None:
            return "learner"
        step = self.version.step
        if not evaluated:
            too_old = self._rounds.too_old(step)
            if self.done or self._rounds.size(step, too_old) is not None:
                return "evaluation"
        return "rollouts"

    def _arrive(self, version: Version) -> None:
        self.version = version
        self.done = version.step >= self._run.steps
        self.short = True

    def _fill(self, current: Round, version: Version) -> list[Task]:
        teaching, step, used = self.teaching, current.step, current.used
        issued: list[Task] = []
        first = not current.selected
        if first:
            current.selected = True
            current.owed = self._run.prompts_per_step
        if current.owed:
            picks = teaching.select(step, current.owed, used, first=first)
            self.notices += teaching.strategy.take_notices()
            current.dry = len(picks) < current.owed
            current.owed -= len(picks)
            issued += self._issue(current, version, picks)
        wanted = min(current.vacant, self._config.max_refill - current.refills)
        if wanted > 0 and not current.dry:
            picks = teaching.refill(step, wanted, used)
            current.dry = len(picks) < wanted
            current.vacant -= len(picks)
            current.refills += len(picks)
            issued += self._issue(current, version, picks)
        return issued

    def _issue(self, current: Round, version: Version, picks: list[Pick]) -> list[Task]:
        rollout, seed = self._config.rollout, self._run.seed
        issued = []
        for problem, reason in picks:
            task = self._books.issue(
                version,
                "train",
                reason,
                -1,
                problem,
                current.step,
                rollout.group_size,
                rollout.temperature,
                task_seed(seed, current.step, current.places),
            )
            current.places += 1
            current.replays += self.teaching.visited(problem)
            self._rounds.add(current, task)
            issued.append(task)
        return issued

    def _figures(self, task: Task, event: Outcome) -> Figures | None:
        """The figures of a group that stands; None where it does not."""
        if event.status == "failed" or len(event.rewards) != task.group_size:
            return None
        missing = event.rewards.count(None)
        if missing and task.group_size - missing < self._config.grading.needed(task.group_size):
            return None
        try:
            return self._grader.figures(event, complete=not missing)
        except ArithmeticError:  # rewards whose squares no float64 can hold
            return None

    def _end(self, task: Task, end: str, kind: str = "", *, replace: bool = True) -> None:
        """The one exit of a training task."""
        self._books.end(task, end, kind)
        self.teaching.strategy.free(task.problem)
        for each in self._rounds:
            each.dry = False
        self.short = True
        current = self._rounds.remove(task)
        if current is not None:
            current.vacant += replace
            current.ends[end] = current.ends.get(end, 0) + 1

    def _refusal(self, oldest: Version, newest: Version, current: Version) -> str | None:
        """The end of a group that no batch from now on may train (`protocol.versions.judge`)."""
        if oldest == newest == current:
            return None
        if oldest.generation != current.generation or newest.generation != current.generation:
            return "stale"
        # While a batch is at the learner the next weights may be out before its StepCompleted.
        if newest.step > current.step + (self.batch is not None):
            return "impure"
        lag = self._run.max_lag
        if oldest.step < current.step - lag:
            return "impure" if lag == 0 and newest.step == current.step else "stale"
        return None

    def _expire_late(self, now: float, step: int, size: int) -> bool:
        """End the late tasks if it is time to; returns whether the batch may go."""
        if self._late_since is None:
            self._late_since = now
        full = size == self._run.prompts_per_step
        drop = self._run.on_straggler == "drop" and full
        if not drop and now - self._late_since < self._run.straggler_wait:
            return False
        while late := self._rounds.late(step, size):
            for task in late:
                self.report.dropped(task)
                self._end(task, "expired")
        return True

    def _renew(self, version: Version) -> None:
        """The round came out empty: another one for the same step, or the end of the run."""
        current = self._rounds.open(version.step)
        self.report.empty()
        self._empty_rounds += 1
        for end, count in current.ends.items():
            self._empty_ends[end] = self._empty_ends.get(end, 0) + count
        if self._empty_rounds < self._run.max_empty_rounds:
            current.again()
            self.short = True
            return
        ends = self._empty_ends
        flat, failed = ends.get("zero_variance", 0), ends.get("failed", 0)
        reason: RunEndReason = "nothing_left_to_learn"
        if sum(ends.values()) - flat - failed > max(flat, failed):
            reason = "error"
        elif failed > flat:
            reason = "grader_failing"
        counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "none issued"
        self.over = (
            reason,
            f"{self._empty_rounds} rounds in a row at version {version} had no group to train; "
            f"their tasks ended: {counts}",
        )

    def _release(self, size: int, version: Version) -> BatchReleased:
        taken, current = self._rounds.take(version.step, size)
        self.short = True
        self._empty_rounds, self._empty_ends = 0, {}
        self._batch_replays = current.replays / current.places if current.places else None
        self.batch = {task.id: task for task in taken}
        if size < self._run.prompts_per_step:
            self.notices.append(
                f"batch of version {version}: {size} of {self._run.prompts_per_step} groups "
                f"({current.refills} of {self._config.max_refill} replacements were issued)"
            )
        groups = [
            BatchGroup(task=task.id, attempt=task.got, ref=task.ref)
            for task in taken
            if task.ref is not None
        ]
        return BatchReleased(version=version, groups=groups, planned=self._run.prompts_per_step)

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        version = self.version
        return {
            "rounds": self._rounds.state(),
            "teaching": self.teaching.state(),
            "report": self.report.state(),
            "version": None if version is None else [version.generation, version.step],
            "batch": None if self.batch is None else list(self.batch),
            "short": self.short,
            "over": None if self.over is None else list(self.over),
            "notices": list(self.notices),
            "batch_replays": self._batch_replays,
            "late_since": self._late_since,
            "empty_rounds": self._empty_rounds,
            "empty_ends": dict(self._empty_ends),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become what `state` was taken of; the books come first."""
        tasks = self._books.tasks
        self._rounds.load(state["rounds"], tasks)
        self.teaching.load(state["teaching"])
        self.report.load(state["report"])
        if state["version"] is not None:
            self._arrive(Version(*state["version"]))
        batch = state["batch"]
        self.batch = None if batch is None else {name: tasks[name] for name in batch}
        self.short = state["short"]
        self.over = None if state["over"] is None else (state["over"][0], state["over"][1])
        self.notices = list(state["notices"])
        self._batch_replays = state["batch_replays"]
        self._late_since = state["late_since"]
        self._empty_rounds = state["empty_rounds"]
        self._empty_ends = dict(state["empty_ends"])
