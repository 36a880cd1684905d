"""One attempt from prompt to outcome: encode, sample, grade, send the group, report.

Invariant: the outcome is returned only after its group, if one is wanted, is acknowledged by the
broker; whatever is wrong with this one prompt, its grading or its size is a `failed` outcome, and
never a reward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from actors.engine import Engine, PromptError, Request, RequestError, Sampled
from actors.link import Link
from actors.rewards.pool import Grade, Pool, ToGrade
from actors.rewards.process import GraderDied
from actors.rollout import (
    Unusable,
    check,
    failed_outcome,
    ok_outcome,
    plain_prompt,
    reward_group,
    wants_group,
)
from protocol.codec import ProtocolError, encode
from protocol.config import Config
from protocol.loops import LoopThread
from protocol.messages import GroupRef, Outcome, Started, Task
from protocol.metrics import ActorMetrics


class Runner:
    """Runs attempts side by side, on the main loop."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        pool: Pool,
        kafka: LoopThread,
        link: Link,
        metrics: ActorMetrics,
    ) -> None:
        self._config = config
        self._engine = engine
        self._pool = pool
        self._kafka = kafka
        self._link = link
        self._metrics = metrics

    async def run(self, task: Task, on_sampled: Callable[[Task], None]) -> Outcome:
        """The attempt's outcome; `on_sampled` is called when it leaves the engine.

        Raises EngineDead, BrokerError.
        """
        began = time.monotonic()
        try:
            prompt_tokens = self._engine.encode(task.prompt, task.max_tokens)
            self._link.post(Started(actor=task.actor, task=task.id, attempt=task.attempt))
            sampled = await self._engine.generate(self._request(task, prompt_tokens))
        except (PromptError, RequestError) as error:
            return self._failed(task, str(error))
        sampled_at = time.monotonic()
        on_sampled(task)
        try:
            grades = await self._grade(task, sampled)
            graded_at = time.monotonic()
            check(sampled, grades, self._config.grading)
            ref = await self._send(task, prompt_tokens, sampled, grades)
        except (GraderDied, Unusable) as error:
            return self._failed(task, str(error))
        self._metrics.generate_seconds.observe(sampled_at - began)
        self._metrics.grade_seconds.observe(graded_at - sampled_at)
        self._metrics.attempts.labels(self._end(task, ref)).inc()
        return Outcome(
            **ok_outcome(task, sampled, grades),
            group=ref,
            prompt_length=len(prompt_tokens),
            generate_seconds=sampled_at - began,
            grade_seconds=graded_at - sampled_at,
        )

    def _request(self, task: Task, prompt_tokens: Sequence[int]) -> Request:
        return Request(
            id=task.group,
            prompt_tokens=prompt_tokens,
            n=task.group_size,
            temperature=task.temperature,
            max_tokens=task.max_tokens,
            seed=task.seed if self._config.rollout.seeded else None,
            logprobs=task.send != "none",
        )

    async def _grade(self, task: Task, sampled: Sequence[Sampled]) -> list[Grade]:
        return await self._pool.grade(
            ToGrade(
                data_source=task.data_source,
                prompt=plain_prompt(task.prompt),
                answer=task.answer,
                extra=task.extra,
                completions=[(s.text, s.finish) for s in sampled],
            )
        )

    async def _send(
        self,
        task: Task,
        prompt_tokens: Sequence[int],
        sampled: Sequence[Sampled],
        grades: Sequence[Grade],
    ) -> GroupRef | None:
        if not wants_group(task, grades, self._config.grading):
            return None
        group = reward_group(task, prompt_tokens, sampled, grades)
        try:
            raw = encode(group, max_bytes=self._config.kafka.max_message_bytes)
        except ProtocolError as error:
            raise Unusable(str(error)) from None
        return await self._kafka.run(self._link.deliver(raw))

    def _failed(self, task: Task, why: str) -> Outcome:
        self._metrics.attempts.labels("failed").inc()
        return failed_outcome(task, why)

    @staticmethod
    def _end(task: Task, ref: GroupRef | None) -> str:
        if task.send == "none":
            return "evaluated"
        return "zero_variance" if ref is None else "sent"
