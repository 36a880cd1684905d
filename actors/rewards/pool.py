"""Grades groups in killable child processes.

Invariant: a completion whose grader hangs, dies, raises or returns no finite number is ungraded
(None), never 0; it costs its neighbours nothing; and it is counted by what went wrong.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from actors.rewards.child import LARGEST
from actors.rewards.process import GraderDied, GraderProcess, SetupRefused
from protocol.config import Config, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToGrade:
    """The completions of one task: (text, finish) each, and the problem's columns."""

    data_source: str
    prompt: Any
    answer: Any
    extra: dict[str, Any]
    completions: list[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Grade:
    """One completion's grade; `reward` and `correct` are None together; then `why` says why."""

    reward: float | None
    correct: float | None
    components: dict[str, float] = field(default_factory=dict)
    why: str = ""


class Pool:
    """`grading.workers` child processes; `grade` waits for a free one."""

    def __init__(self, config: Config) -> None:
        self._grading = config.grading
        self._setup = setup_message(config)
        self._free: asyncio.Queue[GraderProcess | None] = asyncio.Queue()
        self._all: set[GraderProcess] = set()
        self.failures: Counter[str] = Counter()
        """Ungraded completions by kind: error, died, none, range."""

    async def start(self) -> None:
        """Start the children. Raises ConfigError that names the reward that cannot be used."""
        try:
            children = await asyncio.gather(
                *(self._start_child() for _ in range(self._grading.workers))
            )
        except SetupRefused as error:
            await self.stop()
            raise ConfigError(f"grading.rewards[{error.index}].name: {error}") from None
        except GraderDied as error:
            await self.stop()
            raise ConfigError(f"grading.rewards: the grader does not start: {error}") from None
        for child in children:
            self._free.put_nowait(child)

    async def stop(self) -> None:
        """Kill the children."""
        await asyncio.gather(*(child.kill() for child in self._all))
        self._all.clear()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def grade(self, group: ToGrade) -> list[Grade]:
        """A grade for each completion, in order. Raises GraderDied if no child comes up."""
        child = await self._free.get()
        done: list[Grade] = []
        try:
            while len(done) < len(group.completions):
                if child is None:
                    child = await self._restart_child()
                try:
                    await self._grade_rest(child, group, done)
                except GraderDied as error:
                    self._all.discard(child)
                    await child.kill()
                    child = None
                    done.append(self._failed("died", str(error)))
        except BaseException:
            if child is not None:
                # Answers of a group that was given up must not meet the next one.
                self._all.discard(child)
                await child.kill()
                child = None
            raise
        finally:
            self._free.put_nowait(child)
        return done

    async def _restart_child(self) -> GraderProcess:
        try:
            return await self._start_child()
        except SetupRefused as error:
            # The user's module changed since the start.
            raise GraderDied(f"grading.rewards[{error.index}].name: {error}") from None

    async def _start_child(self) -> GraderProcess:
        child = await GraderProcess.start(self._setup)
        self._all.add(child)
        return child

    async def _grade_rest(self, child: GraderProcess, group: ToGrade, done: list[Grade]) -> None:
        rest = group.completions[len(done) :]
        await child.send(
            {
                "data_source": group.data_source,
                "prompt": group.prompt,
                "answer": group.answer,
                "extra": group.extra,
                "completions": [{"text": text, "finish": finish} for text, finish in rest],
            }
        )
        for _ in rest:
            answers = [await child.answer(reward.timeout) for reward in self._grading.rewards]
            done.append(self._combine(answers))

    def _combine(self, answers: list[dict[str, Any]]) -> Grade:
        """Σ weight × score over the functions that graded this completion."""
        rewards = self._grading.rewards
        terms: list[float] = []
        correct: float | None = None
        components: dict[str, float] = {}
        for reward, answer in zip(rewards, answers, strict=True):
            if "failed" in answer:
                return self._failed("error", f"{reward.name}: {answer['failed']}")
            prefix = f"{reward.name}." if len(rewards) > 1 else ""
            components |= {f"{prefix}{name}": v for name, v in answer["components"].items()}
            if answer["score"] is None:
                continue
            terms.append(reward.weight * answer["score"])
            correct = answer["correct"] if correct is None else correct
            if len(rewards) > 1:
                components[reward.name] = answer["score"]
        if not terms:
            return self._failed("none", "no reward function graded it")
        # fsum: weights such as 0.7, 0.2, 0.1 must reach correct_at = 1.
        try:
            total = math.fsum(terms)
        except (OverflowError, ValueError):
            total = math.inf
        if abs(total) > LARGEST:
            return self._failed("range", f"reward {total:g} is beyond {LARGEST:g}")
        limits = self._grading.range
        if limits is not None and not limits[0] <= total <= limits[1]:
            return self._failed("range", f"reward {total:g} lies outside grading.range {limits}")
        if correct is None:
            correct = float(total >= self._grading.correct_at)
        return Grade(total, correct, components)

    def _failed(self, kind: str, why: str) -> Grade:
        self.failures[kind] += 1
        count = self.failures[kind]
        # Every failure is counted; the log shows the first, and then ever fewer.
        if count & (count - 1) == 0:
            log.warning("a completion is ungraded (%s, number %d): %s", kind, count, why)
        return Grade(None, None, why=why)


def setup_message(config: Config) -> dict[str, Any]:
    """What a grader process is told at its start."""
    return {
        "rewards": [
            {"name": r.name, "style": r.style, "options": r.options} for r in config.grading.rewards
        ],
        "answer_field": config.data.fields.answer,
        "memory_bytes": config.grading.memory_bytes,
    }


def validate_rewards(config: Config) -> None:
    """Start one grader with the config's reward functions and end it again.

    Raises ConfigError that names the reward that cannot be used. The functions are imported in the
    child alone, from where the actors' own children look: working directory and PYTHONPATH.
    """

    async def check() -> None:
        grading = config.grading.model_copy(update={"workers": 1})
        async with Pool(config.model_copy(update={"grading": grading})):
            pass

    asyncio.run(check())
