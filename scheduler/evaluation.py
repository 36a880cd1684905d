"""Held-out sets, measured at exact versions.

Invariant: an evaluation is tasks of its own, outside admission and strategy, all at one version; it
is in when each of them has ended, and its figures are over those that ended `evaluated`. It is due
at the version before the first step, every `every` steps, and at the version after the last step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol.config import Config
from protocol.messages import Outcome
from protocol.records import EvalRecord
from protocol.versions import Version
from scheduler.accounts import Books, Task
from scheduler.training import task_seed

# A completion passes when at least half of what is counted is right; for 0/1 that is 1.
PASSES_AT = 0.5


@dataclass(frozen=True, slots=True)
class EvalSet:
    """One held-out set.

    Attributes:
        name: as in metrics; the `dataset` of its tasks.
        sources: data source of each problem; its length is the number of problems.
        every: steps between evaluations; the first weights and the last are evaluated in any case.
        n: sampled completions a problem.
        greedy: whether each problem gets one greedy completion besides.
        temperature: of the sampled completions.
        max_tokens: longest completion.
    """

    name: str
    sources: Sequence[str]
    every: int
    n: int
    greedy: bool
    temperature: float
    max_tokens: int


class _Running:
    """One set at one version: what is not in, and what came in."""

    def __init__(self, version: Version, pending: int) -> None:
        self.version = version
        self.pending = pending
        self.failed = 0
        # By problem: graded completions, sum of `correct`, whether one passed.
        self.sampled: dict[int, tuple[int, float, bool]] = {}
        self.greedy: dict[int, float] = {}

    def state(self) -> list[Any]:
        return [
            [self.version.generation, self.version.step],
            self.pending,
            self.failed,
            [[problem, *result] for problem, result in self.sampled.items()],
            [[problem, correct] for problem, correct in self.greedy.items()],
        ]

    @classmethod
    def from_state(cls, state: list[Any]) -> _Running:
        running = cls(Version(*state[0]), state[1])
        running.failed = state[2]
        running.sampled = {problem: tuple(result) for problem, *result in state[3]}
        running.greedy = dict(state[4])
        return running


class Evaluation:
    """The evaluations that are due, running and done.

    Attributes:
        sets: in the order of `Task.dataset`.
    """

    def __init__(self, config: Config, sets: Sequence[EvalSet], books: Books) -> None:
        self.sets = list(sets)
        self._config = config
        self._books = books
        self._running: dict[int, _Running] = {}

    @property
    def running(self) -> bool:
        """Is an evaluation not in?"""
        return bool(self._running)

    def start(self, version: Version) -> list[Task]:
        """Issue the tasks of the sets that are due at `version`, or were running before it."""
        issued: list[Task] = []
        for index, each in enumerate(self.sets):
            if not self._due(each, version.step) and index not in self._running:
                continue
            tasks = self._issue(index, each, version)
            if tasks:
                self._running[index] = _Running(version, len(tasks))
            issued += tasks
        return issued

    def drop(self) -> None:
        """End every open evaluation task `stale`: a learner of a new generation is ready."""
        for task in [task for task in self._books.tasks.values() if not task.training]:
            self._books.end(task, "stale")

    def outcome(self, task: Task, event: Outcome) -> None:
        """The first outcome of an open task."""
        task.got = event.attempt
        exact = event.oldest == event.newest == task.version
        correct = [value for value in event.correct if value is not None]
        needed = self._config.grading.needed(task.group_size)
        stands = len(event.correct) == task.group_size and len(correct) >= max(
            1, min(needed, task.group_size)
        )
        if event.status == "failed" or not exact or not stands:
            self._end(task, "failed")
            return
        running = self._running[task.dataset]
        if task.temperature == 0:
            running.greedy[task.problem] = correct[0]
        else:
            passed = max(correct) >= PASSES_AT
            running.sampled[task.problem] = (len(correct), sum(correct), passed)
        self._end(task, "evaluated")

    def give_up(self, task: Task) -> None:
        """No attempt of the task brought an outcome."""
        self._end(task, "expired")

    def close(self, task: Task, end: str) -> None:
        """The run ends, and nobody waits for the task any longer."""
        self._books.end(task, end)
        self._running.pop(task.dataset, None)

    def records(self, seconds: float, rollouts: int) -> list[EvalRecord]:
        """The evaluations that just came in; each is returned once."""
        done = [index for index, running in self._running.items() if running.pending == 0]
        return [
            self._record(self.sets[index], self._running.pop(index), seconds, rollouts)
            for index in done
        ]

    def _due(self, each: EvalSet, step: int) -> bool:
        return step == 0 or step % each.every == 0 or step == self._config.run.steps

    def _issue(self, index: int, each: EvalSet, version: Version) -> list[Task]:
        kinds = [(each.n, each.temperature)] + ([(1, 0.0)] if each.greedy else [])
        seed = self._config.run.seed
        return [
            self._books.issue(
                version,
                "eval",
                "eval",
                index,
                problem,
                version.step,
                size,
                temperature,
                task_seed(seed, each.name, version.step, problem, temperature),
            )
            for problem in range(len(each.sources))
            for size, temperature in kinds
        ]

    def _end(self, task: Task, end: str) -> None:
        self._books.end(task, end)
        running = self._running[task.dataset]
        running.pending -= 1
        running.failed += end != "evaluated"

    def _record(
        self, each: EvalSet, running: _Running, seconds: float, rollouts: int
    ) -> EvalRecord:
        by_source: dict[str, list[int]] = {}
        for problem, source in enumerate(each.sources):
            by_source.setdefault(source, []).append(problem)
        whole = _figures(running, range(len(each.sources)))
        return EvalRecord(
            name=each.name,
            version=running.version,
            seconds=seconds,
            rollouts=rollouts,
            problems=len(each.sources),
            failed=running.failed,
            n=each.n,
            mean=whole["mean"],
            standard_error=_standard_error(running),
            passed=whole["passed"],
            greedy=whole["greedy"],
            by_source={
                source: {**_figures(running, problems), "problems": len(problems)}
                for source, problems in sorted(by_source.items())
            },
        )

    def state(self) -> list[Any]:
        """What `load` needs."""
        return [[index, running.state()] for index, running in self._running.items()]

    def load(self, state: list[Any]) -> None:
        """Become what `state` was taken of."""
        self._running = {index: _Running.from_state(running) for index, running in state}


def _figures(running: _Running, problems: Iterable[int]) -> dict[str, float | None]:
    """mean@n, pass@n and greedy accuracy over those of `problems` that came in."""
    sampled, greedy = running.sampled, running.greedy
    results = [sampled[problem] for problem in problems if problem in sampled]
    graded = sum(result[0] for result in results)
    first = [greedy[problem] for problem in problems if problem in greedy]
    return {
        "mean": sum(result[1] for result in results) / graded if graded else None,
        "passed": sum(result[2] for result in results) / len(results) if results else None,
        "greedy": sum(first) / len(first) if first else None,
    }


def _standard_error(running: _Running) -> float | None:
    """Of mean@n for these problems: sqrt(Σ p(1−p) / n) / problems.

    p is not known; of n completions with mean p̂, p̂(1−p̂)·n/(n−1) estimates p(1−p) without bias, as
    E[p̂(1−p̂)] = p(1−p)(n−1)/n. So each problem adds p̂(1−p̂)/(n−1). None where n is 1 anywhere.
    """
    results = running.sampled.values()
    if not results or any(n < 2 for n, _, _ in results):
        return None
    total = sum((c / n) * (1 - c / n) / (n - 1) for n, c, _ in results)
    return math.sqrt(max(0.0, total)) / len(results)
