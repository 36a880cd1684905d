"""The optimizer steps: which training tasks are issued, how they end, which batch goes out when.

Invariants. Every training task that is issued ends once, through `_end`, which gives its place and
its problem back. At most (L + 1) · prompts_per_step training tasks are open, a released one until
its StepCompleted. Rounds of the steps c … c + L are open at current step c, and none beyond
`run.steps`. A batch is released when the learner is idle, the evaluation of its version is in, no
older group is left behind that would become too old (`scheduler.rounds`), and `prompts_per_step`
groups are ready; or fewer, when the round's refill is spent or the strategy has nothing more to
offer and no task of the round is open.

Stragglers. The wait for them is bounded by `straggler_wait` of log time, counted from when the
batch could go without them: enough groups are ready, or (at lag 0 always) every open task of the
round is such a straggler and at least one group is ready. Then they end `expired` and are not
replaced. With `on_straggler: drop` they end so at once where a full batch is ready.

A learner that starts anew (a higher generation) ends every open task `stale`; its version becomes
current and rounds begin anew there. What the strategy has learned stays.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

from protocol.config import Config, PrioritizedConfig
from protocol.messages import BatchGroup, BatchReleased, Outcome, RunEndReason, StepCompleted
from protocol.records import StepRecord
from protocol.versions import Version
from scheduler.accounts import Books, Task
from scheduler.flat import dump, load
from scheduler.grading import Figures, figures
from scheduler.report import Report
from scheduler.rounds import Round, age_key, deal, held_up_by
from scheduler.strategies.base import Pick, Strategy
from scheduler.strategies.prioritized import Prioritized
from scheduler.strategies.uniform import Uniform

SEED_BITS = 53


def task_seed(*place: object) -> int:
    """A 53-bit number that depends on `place` alone: run seed, round and place in the round."""
    digest = hashlib.blake2b(":".join(map(str, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> (64 - SEED_BITS)


def make_strategy(config: Config, problems: int) -> Strategy:
    """The strategy that the config names."""
    if isinstance(config.strategy, PrioritizedConfig):
        return Prioritized(config.strategy, problems, config.run.seed)
    return Uniform(problems, config.run.seed)


class Training:
    """Rounds, batches, and what the strategy is taught.

    Attributes:
        version: of the weights that the next batch changes; None before the first LearnerReady.
        strategy: chooses the problems.
        report: the figures of the step.
        batch: tasks at the learner, by id, in the order of the batch; None while it is idle.
        over: why the run cannot go on, once it cannot.
    """

    def __init__(self, config: Config, problems: int, books: Books) -> None:
        self._config = config
        self._books = books
        self._planned = config.run.prompts_per_step
        self._lag = config.run.max_lag
        self.version: Version | None = None
        self.strategy = make_strategy(config, problems)
        self.report = Report()
        self.batch: dict[str, Task] | None = None
        self.over: tuple[RunEndReason, str] | None = None
        self.notices: list[str] = []
        self._batch_replays: float | None = None
        self._rounds: dict[int, Round] = {}
        # Counts over all rounds: groups that are ready; tasks without outcome by step of issue.
        self._ready = 0
        self._waiting: dict[int, int] = {}
        self._short = False
        self._straggling_since: float | None = None
        self._empty_rounds = 0
        self._empty_ends: dict[str, int] = {}
        # Per problem: groups that taught the strategy, and 1 + step of the last one's version.
        self._visits = array("I", bytes(4 * problems))
        self._observed = array("I", bytes(4 * problems))
        self._distinct = 0
        self._most_visits = 0

    @property
    def done(self) -> bool:
        """Is the last step completed?"""
        return self.version is not None and self.version.step >= self._config.run.steps

    @property
    def short(self) -> bool:
        """May there be a place to fill? `fill` looks and makes it False."""
        return self._short

    def begin(self, version: Version) -> None:
        """A learner is ready at `version`, of a new generation."""
        for task in list(self._books.of_training()):
            self._end(task, "stale", replace=False)
        self.version = version
        self.batch = None
        self._rounds = {}
        self._waiting = {}
        self._ready = 0
        self._short = True
        self._straggling_since = None
        self._empty_rounds, self._empty_ends = 0, {}
        # Every version of an earlier generation is older than any of this one.
        self._observed = array("I", bytes(4 * len(self._observed)))

    def fill(self) -> list[Task]:
        """Issue tasks for the free places of the open rounds, the earliest round first."""
        self._short = False
        if self.version is None or self.over is not None:
            return []
        issued: list[Task] = []
        now = self.version.step
        for step in range(now, min(now + self._lag, self._config.run.steps - 1) + 1):
            current = self._rounds.get(step)
            if current is None:
                current = self._rounds[step] = Round(step)
            if not current.dry:
                issued += self._fill(current, self.version)
        return issued

    def outcome(self, task: Task, event: Outcome) -> None:
        """The first outcome of an open task: it is ready for a batch, or ends and is replaced."""
        self._set_got(task, event.attempt)
        self.report.rolled_out(event)
        grading = self._config.grading
        graded = sum(reward is not None for reward in event.rewards)
        if (
            event.status == "failed"
            or event.oldest is None
            or event.newest is None
            or len(event.rewards) != task.group_size
            or graded < max(1, grading.needed(task.group_size))
        ):
            self._end(task, "failed")
            return
        group = figures(event, grading)
        self.report.graded(task, group)
        self._teach(task, event.attempt, event.oldest, group)
        refused = self._refusal(event.oldest, event.newest)
        keep = self._config.run.keep_zero_variance
        if refused is not None:
            self._end(task, refused)
        elif group.zero_variance and not keep:
            self._end(task, "zero_variance", group.kind)
        elif event.group is None:
            self._end(task, "failed")
        else:
            task.ref, task.oldest, task.reward = event.group, event.oldest, group.reward
            self._ready += 1

    def fail(self, task: Task, end: str) -> None:
        """A task that will have no outcome ends `failed` or `expired`, and is replaced."""
        self._end(task, end)

    def release(self, now: float, evaluated: bool) -> BatchReleased | None:
        """The next batch, if it may go; also gives up stragglers, and renews an empty round.

        Args:
            now: log time in seconds.
            evaluated: whether the evaluation due at the current version is in.
        """
        if self.version is None or self.done or self.batch is not None or self.over is not None:
            return None
        size = self._size() if evaluated else None
        if size is None:
            self._straggling_since = None
            return None
        if self._held(size):
            if size == 0 or not self._give_up(now, size):
                return None
            size = self._size()
            if size is None or self._held(size):
                return None
        self._straggling_since = None
        if size == 0:
            self._renew()
            return None
        return self._release(size, self.version)

    def complete(self, event: StepCompleted, seconds: float) -> StepRecord:
        """The batch at the learner is done: book the end of each of its groups."""
        assert self.batch is not None and self.version is not None
        batch, self.batch = self.batch, None
        ends = {(each.task, each.attempt): each.end for each in event.ends}
        trained: list[Task] = []
        for task in batch.values():
            end = ends.get((task.id, task.got), "failed")
            if end == "trained":
                trained.append(task)
            self._end(task, end)
        record = self.report.step(
            event,
            trained,
            seconds=seconds,
            groups=len(batch),
            planned=self._planned,
            replay_share=self._batch_replays,
            pools=self.strategy.pools(),
            distinct=self._distinct,
            most_visits=self._most_visits,
            accounts=self._books.accounts,
        )
        self.version = self.version.next_step()
        self._short = True
        self._end_stale(self.version)
        return record

    def surplus(self, tasks: list[Task]) -> None:
        """The run ends: these tasks are no longer wanted."""
        for task in tasks:
            self._end(task, "surplus", replace=False)

    def expire(self, tasks: list[Task]) -> None:
        """The run ends, and the wait for these tasks is over."""
        for task in tasks:
            self._end(task, "expired", replace=False)

    def ready(self) -> list[Task]:
        """Groups that wait for a batch."""
        return [task for task in self._books.of_training() if task.got and not self._at(task)]

    def waits_for(self, evaluated: bool) -> str:
        """What holds up the next batch: learner, evaluation or rollouts."""
        if self.batch is not None or self.version is None:
            return "learner"
        if not evaluated and (self.done or self._size() is not None):
            return "evaluation"
        return "rollouts"

    def _at(self, task: Task) -> bool:
        return self.batch is not None and task.id in self.batch

    def _fill(self, current: Round, version: Version) -> list[Task]:
        issued: list[Task] = []
        if not current.selected:
            current.selected = True
            current.owed = self._planned
            issued += self._pick(current, version, first=True)
        elif current.owed:
            issued += self._pick(current, version, first=False)
        want = min(current.vacant, self._config.max_refill - current.refills)
        if want > 0 and not current.dry:
            picks = self.strategy.refill(current.step, want, current.used)
            current.dry = len(picks) < want
            current.vacant -= len(picks)
            current.refills += len(picks)
            issued += self._issue(current, version, picks)
        return issued

    def _pick(self, current: Round, version: Version, *, first: bool) -> list[Task]:
        room = (self._lag + 1) * self._planned - self._open()
        want = min(current.owed, room)
        picks = self.strategy.select(current.step, want, current.used, first=first)
        self.notices += self.strategy.take_notices()
        current.dry = len(picks) < want
        current.owed -= len(picks)
        return self._issue(current, version, picks)

    def _issue(self, current: Round, version: Version, picks: list[Pick]) -> list[Task]:
        rollout, seed = self._config.rollout, self._config.run.seed
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
            current.replays += self._visits[problem] > 0
            current.add(task)
            issued.append(task)
        if issued:
            self._waiting[version.step] = self._waiting.get(version.step, 0) + len(issued)
        return issued

    def _open(self) -> int:
        at_learner = 0 if self.batch is None else len(self.batch)
        return at_learner + sum(len(each.alive) for each in self._rounds.values())

    def _set_got(self, task: Task, attempt: int) -> None:
        task.got = attempt
        self._rounds[task.step].waiting -= 1
        self._waiting[task.version.step] -= 1

    def _end(self, task: Task, end: str, kind: str = "", *, replace: bool = True) -> None:
        """The one exit of a training task."""
        self._books.end(task, end, kind)
        self.strategy.free(task.problem)
        for each in self._rounds.values():
            each.dry = False
        self._short = True
        current = self._rounds.get(task.step)
        if current is None or task.id not in current.alive:
            return  # it was at the learner: its round is over
        current.remove(task)
        if not task.got:
            self._waiting[task.version.step] -= 1
        elif task.ref is not None:
            self._ready -= 1
        current.vacant += replace
        current.ends[end] = current.ends.get(end, 0) + 1

    def _teach(self, task: Task, attempt: int, oldest: Version, group: Figures) -> None:
        """Only first attempts of the current generation, and never an older version than before."""
        assert self.version is not None
        problem = task.problem
        if attempt != 1 or oldest.generation != self.version.generation:
            return
        if oldest.step + 1 < self._observed[problem]:
            return
        self._observed[problem] = oldest.step + 1
        visits = self._visits[problem] + 1
        self._visits[problem] = visits
        self._distinct += visits == 1
        self._most_visits = max(self._most_visits, visits)
        self.strategy.observe(problem, task.step, group)

    def _refusal(self, oldest: Version, newest: Version) -> str | None:
        """The end of a group that no later batch may train, by `protocol.versions.judge`."""
        assert self.version is not None
        generation, step = self.version.generation, self.version.step
        if oldest.generation != generation or newest.generation != generation:
            return "stale"
        # While a batch is at the learner, the next weights may be out before its StepCompleted.
        if newest.step > step + (self.batch is not None):
            return "impure"
        if oldest.step < step - self._lag:
            return "impure" if self._lag == 0 and newest.step == step else "stale"
        return None

    def _size(self) -> int | None:
        """Groups that the batch would take, were it not for stragglers; None if it is too early."""
        assert self.version is not None
        current = self._rounds.get(self.version.step)
        if current is None:
            return None
        if self._ready >= self._planned:
            return self._planned
        if current.waiting > self._stragglers():
            return None
        return len(current.alive) - current.waiting

    def _stragglers(self) -> int:
        """Tasks without outcome that would be too old for the next batch."""
        assert self.version is not None
        last = self.version.step - self._lag
        return sum(count for step, count in self._waiting.items() if step <= last)

    def _held(self, size: int) -> bool:
        return self._stragglers() > 0 or (self._lag > 1 and bool(self._late(size)))

    def _late(self, size: int) -> list[Task]:
        assert self.version is not None
        tasks = (task for each in self._rounds.values() for task in each.alive.values())
        return held_up_by(tasks, self.version.step, self._lag, self._planned, size)

    def _give_up(self, now: float, size: int) -> bool:
        """End the stragglers if it is time to."""
        run, waits = self._config.run, self._config.run.straggler_wait
        if self._straggling_since is None:
            self._straggling_since = now
        drop = run.on_straggler == "drop" and size == self._planned
        if not drop and now - self._straggling_since < waits:
            return False
        for task in self._late(size):
            self.report.dropped(task)
            self._end(task, "expired", replace=False)
        return True

    def _renew(self) -> None:
        """The round came out empty: another one for the same step, or the end of the run."""
        assert self.version is not None
        current = self._rounds[self.version.step]
        self.report.empty()
        self._empty_rounds += 1
        for end, count in current.ends.items():
            self._empty_ends[end] = self._empty_ends.get(end, 0) + count
        if self._empty_rounds < self._config.run.max_empty_rounds:
            current.again()
            self._short = True
            return
        ends = self._empty_ends
        counts = ", ".join(f"{count} {end}" for end, count in sorted(ends.items())) or "none issued"
        flat, failed = ends.get("zero_variance", 0), ends.get("failed", 0)
        reason: RunEndReason = "nothing_left_to_learn"
        if sum(ends.values()) - flat - failed > max(flat, failed):
            reason = "error"
        elif failed > flat:
            reason = "grader_failing"
        self.over = (
            reason,
            f"{self._empty_rounds} rounds in a row at version {self.version} had no group to "
            f"train; their tasks ended: {counts}",
        )

    def _release(self, size: int, version: Version) -> BatchReleased:
        current = self._rounds.pop(version.step)
        later = [self._rounds[step] for step in sorted(self._rounds)]
        pool = (task for each in (current, *later) for task in each.alive.values() if task.got)
        taken = sorted(pool, key=age_key)[:size]
        deal(later, taken, current, self._planned)
        self._ready -= size
        self._short = True
        self._empty_rounds, self._empty_ends = 0, {}
        self._batch_replays = current.replays / current.places if current.places else None
        self.batch = {task.id: task for task in taken}
        groups = []
        for task in taken:
            assert task.ref is not None
            groups.append(BatchGroup(task=task.id, attempt=task.got, ref=task.ref))
        if size < self._planned:
            self.notices.append(
                f"batch of version {version}: {size} of {self._planned} groups (replacements "
                f"issued: {current.refills} of {self._config.max_refill})"
            )
        return BatchReleased(version=version, groups=groups, planned=self._planned)

    def _end_stale(self, version: Version) -> None:
        """Ready groups that are too old for every batch from `version` on."""
        for task in self.ready():
            if task.oldest is not None and task.oldest.step < version.step - self._lag:
                self._end(task, "stale")
