"""The figures of a step while it lasts, and the totals of the run, for metrics.jsonl.

Invariant: nothing here is an input of a decision; every figure is a function of the events.
"""

from __future__ import annotations

from typing import Any

import msgspec

from protocol.messages import Outcome, StepCompleted
from protocol.records import Accounts, ReasonCount, StepRecord
from scheduler.accounts import Task
from scheduler.grading import Figures

MAX_DROPPED = 10_000


class Report:
    """Totals of the run, and the open step's figures.

    Attributes:
        rollouts, rollout_tokens: completions of training tasks and their tokens, whatever the end.
        trained_tokens, impure_trained: sums of the learner's figures.
    """

    def __init__(self) -> None:
        self.rollouts = 0
        self.rollout_tokens = 0
        self.trained_tokens = 0
        self.impure_trained = 0
        # Stragglers that were given up and have not come in late yet.
        self._dropped: dict[str, None] = {}
        self._clear()

    def _clear(self) -> None:
        self._by_reason: dict[str, ReasonCount] = {}
        self._waited: dict[str, float] = {"rollouts": 0.0, "learner": 0.0, "evaluation": 0.0}
        self._empty_rounds = 0
        self._given_up = 0
        self._late_tokens = 0
        self._late_completions = 0

    def came_in(self, task: Task, outcome: Outcome, group: Figures | None) -> None:
        """The first outcome of a training task; `group` is None if its group does not stand."""
        self.rollouts += len(outcome.lengths)
        self.rollout_tokens += sum(outcome.lengths)
        if group is None:
            return
        count = self._by_reason.get(task.reason)
        if count is None:
            count = self._by_reason[task.reason] = ReasonCount()
        count.groups += 1
        count.reward += group.reward
        count.correct += group.p
        if group.zero_variance:
            count.zero_variance += 1
        elif 0.0 < group.p < 1.0:
            count.mixed += 1
        else:
            count.shaping_only += 1

    def waited(self, cause: str, seconds: float) -> None:
        """Log time passed: `cause` is rollouts, learner or evaluation."""
        self._waited[cause] += seconds

    def empty(self) -> None:
        """A round came out empty."""
        self._empty_rounds += 1

    def dropped(self, task: Task) -> None:
        """A straggler was given up."""
        self._given_up += 1
        self._dropped[task.id] = None
        if len(self._dropped) > MAX_DROPPED:
            del self._dropped[next(iter(self._dropped))]

    def late(self, outcome: Outcome) -> None:
        """An outcome of a task that has ended."""
        if outcome.task in self._dropped:
            del self._dropped[outcome.task]
            self._late_tokens += sum(outcome.lengths)
            self._late_completions += len(outcome.lengths)

    def step(
        self,
        event: StepCompleted,
        trained: list[Task],
        *,
        seconds: float,
        groups: int,
        planned: int,
        replay_share: float | None,
        pools: dict[str, int],
        distinct: int,
        most_visits: int,
        accounts: Accounts,
    ) -> StepRecord:
        """The record of the step that just completed; the next step's figures begin."""
        self.trained_tokens += _count(event.metrics.get("tokens", 0))
        self.impure_trained += _count(event.metrics.get("impure_trained", 0))
        counts = self._by_reason.values()
        came_in = sum(count.groups for count in counts)
        explored = self._by_reason.get("explore")
        record = StepRecord(
            version=event.version,
            seconds=seconds,
            rollouts=self.rollouts,
            rollout_tokens=self.rollout_tokens,
            groups=groups,
            planned=planned,
            trained=len(trained),
            reward_trained=_mean(sum(task.reward for task in trained), len(trained)),
            reward_explored=None if explored is None else explored.reward / explored.groups,
            zero_variance_share=_mean(sum(count.zero_variance for count in counts), came_in),
            replay_share=replay_share,
            mean_abs_advantage=event.metrics.get("mean_abs_advantage"),
            by_reason=self._by_reason,
            pools=pools,
            distinct_problems=distinct,
            most_visits=most_visits,
            lag=_lag(trained, event.version.step),
            accounts=accounts,
            learner=dict(event.metrics),
            waited=self._waited,
            empty_rounds=self._empty_rounds,
            dropped=self._given_up,
            dropped_length=_mean(self._late_tokens, self._late_completions),
        )
        self._clear()
        return record

    def state(self) -> dict[str, Any]:
        """What `load` needs."""
        return {
            "rollouts": self.rollouts,
            "rollout_tokens": self.rollout_tokens,
            "trained_tokens": self.trained_tokens,
            "impure_trained": self.impure_trained,
            "dropped": list(self._dropped),
            "by_reason": {
                reason: msgspec.to_builtins(count) for reason, count in self._by_reason.items()
            },
            "waited": dict(self._waited),
            "counts": [
                self._empty_rounds,
                self._given_up,
                self._late_tokens,
                self._late_completions,
            ],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the report that `state` was taken of."""
        self.rollouts = state["rollouts"]
        self.rollout_tokens = state["rollout_tokens"]
        self.trained_tokens = state["trained_tokens"]
        self.impure_trained = state["impure_trained"]
        self._dropped = dict.fromkeys(state["dropped"])
        self._by_reason = {
            reason: ReasonCount(**count) for reason, count in state["by_reason"].items()
        }
        self._waited = dict(state["waited"])
        (self._empty_rounds, self._given_up, self._late_tokens, self._late_completions) = state[
            "counts"
        ]


def _count(value: float) -> int:
    return int(min(max(value, 0), 2**53))


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _lag(trained: list[Task], step: int) -> dict[str, int]:
    lags: dict[str, int] = {}
    for task in sorted(trained, key=lambda task: -_oldest(task)):
        age = str(step - _oldest(task))
        lags[age] = lags.get(age, 0) + 1
    return lags


def _oldest(task: Task) -> int:
    return (task.version if task.oldest is None else task.oldest).step
