"""Prioritized Replay (Fatemi, arXiv 2601.02648): a max-heap on ω, replaying prompts near p = ½.

The priority of a problem is ω of its latest group, which for 0/1 rewards is p(1 − p)
(`scheduler.grading` has the derivation). Around the paper's heap and pools stand constants
of our choice, see `protocol.config.PrioritizedConfig`.

A first selection takes, in this order: problems due for a retest, oldest date first, up to their
share; exploration draws, uniform over all problems that are neither cooling nor in flight; then the
best of heap and unseen. An unseen problem stands at the *expected* ω of a first visit: the mean of
the first visits so far, begun at `initial_omega` with the weight of one visit (`optimistic`: above
all that were seen). It is drawn, at random among the unseen, where that is more than the top of the
heap; on a tie the heap goes first, and ties within the heap are random. Replacements follow the
same order of heap and unseen, and never come from a pool. When heap and unseen are exhausted, a
first selection falls back (said once) on due retests beyond their share, then on pooled problems
not yet due, earliest date first, then on cooling problems, oldest first.

A problem is used in a step when it is issued for it, whatever becomes of the task, and eligible
again from step + cooldown on (at least the next step), also where its due date comes earlier.

Invariant: a problem is in exactly one of in flight, cooling, available; an available one is in the
heap if its status says so and has a due date if its latest group had no variance. At most 230 bytes
a problem: 90 in flat arrays and 84 for an entry in each heap, left-behind entries included.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Set
from random import Random
from typing import Any

from protocol.config import PrioritizedConfig
from protocol.messages import Reason
from scheduler.cooldown import Cooldown
from scheduler.flat import dump, dump_random, load, load_random
from scheduler.grading import Figures
from scheduler.heap import AddressableHeap
from scheduler.pools import Pools, posterior_mean
from scheduler.strategies.base import Pick, Strategy

# Status: what the latest group said. Watched: the first without variance; after more, away.
UNSEEN, MIXED, WATCHED_SOLVED, WATCHED_UNSOLVED, SOLVED, UNSOLVED = range(6)
SOLVED_STATUS = (WATCHED_SOLVED, SOLVED)
IN_HEAP = (MIXED, WATCHED_SOLVED, WATCHED_UNSOLVED)
AVAILABLE, COOLING, IN_FLIGHT = range(3)
EXPLORATION_TRIES = 64

FALLBACK_NOTICE = (
    "selection: neither the heap nor unseen problems can fill a batch; it falls back on retests "
    "beyond their share, then pooled problems not yet due, then cooling ones (more problems, or a "
    "smaller strategy.cooldown, would avoid it)"
)


class Prioritized(Strategy):
    """Heap, unseen problems, pools, cooldown, exploration."""

    def __init__(self, config: PrioritizedConfig, problems: int, seed: int) -> None:
        self._config = config
        self._problems = problems
        self._rng = Random(seed)
        self._heap = AddressableHeap(problems, self._rng)
        self._pools = Pools(problems, self._rng, config.retest_after, config.retest_max)
        self._cooldown = Cooldown()
        self._omega = array("d", bytes(8 * problems))
        self._eligible_from = array("i", bytes(4 * problems))
        self._status = bytearray(problems)
        self._where = bytearray(problems)
        self._bag = array("I", range(problems))
        self._in_bag = bytearray(b"\1" * problems)
        self._available = [problems, 0, 0, 0, 0, 0]
        self._in_flight = 0
        self._step = 0
        self._first_visits = 0
        self._first_omega = 0.0
        self._carried = [0.0, 0.0]
        self._said = False
        self._notices: list[str] = []

    @property
    def expected_omega(self) -> float:
        """At which an unseen problem stands."""
        if self._config.initial == "optimistic":
            return math.inf
        return (self._config.initial_omega + self._first_omega) / (1 + self._first_visits)

    def select(self, step: int, count: int, used: Set[int], *, first: bool = True) -> list[Pick]:
        """Retests, exploration, then the best of heap and unseen, then the fallback."""
        self._wake(step)
        picks: list[Pick] = []
        if first:
            quota = self._quota(0, self._config.retest_share * count, count)
            picks += self._retests(step, quota, used)
            quota = self._quota(1, self._config.exploration * count, count - len(picks))
            picks += self._explore(step, quota, used)
        picks += self._best(step, count - len(picks), used)
        if len(picks) < count:
            picks += self._fall_back(step, count - len(picks), used)
        return picks

    def refill(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """The best of heap and unseen."""
        self._wake(step)
        return [(problem, "refill") for problem, _ in self._best(step, count, used)]

    def observe(self, problem: int, step: int, figures: Figures) -> None:
        """Priority, status and due date from the latest group."""
        if self._status[problem] == UNSEEN:
            self._first_visits += 1
            self._first_omega += figures.omega
        if not figures.zero_variance:
            self._pools.mixed(problem)
            self._status[problem] = MIXED
            self._omega[problem] = figures.omega
            return
        solved = figures.p >= 0.5
        if self._pools.zero_variance(problem, step):
            self._status[problem] = SOLVED if solved else UNSOLVED
        else:
            self._status[problem] = WATCHED_SOLVED if solved else WATCHED_UNSOLVED
        self._omega[problem] = posterior_mean(figures.correct, figures.graded)

    def free(self, problem: int) -> None:
        """No longer in flight: cooling, or available at once."""
        self._in_flight -= 1
        if self._eligible_from[problem] > self._step:
            self._where[problem] = COOLING
            self._cooldown.add(problem, self._eligible_from[problem])
        else:
            self._enter(problem)

    def pools(self) -> dict[str, int]:
        """Number of problems by where they are."""
        available = self._available
        return {
            "unseen": available[UNSEEN],
            "heap": sum(available[status] for status in IN_HEAP),
            "solved": available[SOLVED],
            "unsolved": available[UNSOLVED],
            "cooling": len(self._cooldown),
            "in_flight": self._in_flight,
        }

    def metrics(self) -> dict[str, float]:
        """Expected ω of a first visit, and the largest ω in the heap."""
        top = self._heap.peek()[1] if self._heap else 0.0
        return {"expected_omega": self.expected_omega, "largest_omega": top}

    def take_notices(self) -> list[str]:
        """That selection fell back, once."""
        notices, self._notices = self._notices, []
        return notices

    def _quota(self, share: int, exact: float, most: int) -> int:
        """Whole picks of a fractional share: what is cut off is carried to the next selection, so
        that over a run the share is exact."""
        self._carried[share] += exact
        # A share such as .1 is no binary fraction: its multiples may come out a hair below a whole.
        whole = min(int(self._carried[share] + 1e-9), most)
        self._carried[share] -= whole
        return whole

    def _wake(self, step: int) -> None:
        """Problems whose cooldown ends by `step` become available."""
        if step > self._step:
            self._step = step
            for problem in self._cooldown.due(step):
                self._enter(problem)

    def _enter(self, problem: int) -> None:
        status = self._status[problem]
        self._where[problem] = AVAILABLE
        self._available[status] += 1
        if status == UNSEEN:
            if not self._in_bag[problem]:
                self._in_bag[problem] = 1
                self._bag.append(problem)
            return
        if status in IN_HEAP:
            self._heap.push(problem, self._omega[problem])
        self._pools.put(problem)

    def _take(self, problem: int, step: int) -> None:
        """The problem is chosen for `step`."""
        if self._where[problem] == COOLING:
            self._cooldown.remove(problem, self._eligible_from[problem])
        else:
            status = self._status[problem]
            self._available[status] -= 1
            if status in IN_HEAP:
                self._heap.remove(problem)
            self._pools.take(problem)
        self._where[problem] = IN_FLIGHT
        self._in_flight += 1
        # The rounds of several steps are open at once: the latest use counts.
        again = step + max(1, self._config.cooldown)
        self._eligible_from[problem] = max(again, self._eligible_from[problem])

    def _eligible(self, problem: int, step: int, used: Set[int]) -> bool:
        return (
            self._where[problem] == AVAILABLE
            and self._eligible_from[problem] <= step
            and problem not in used
        )

    def _retests(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """At most `count` problems whose due date has come, oldest date first."""
        return [
            (problem, "retest_solved" if solved else "retest_unsolved")
            for problem, solved in self._by_due_date(step, count, used, latest=step)
        ]

    def _by_due_date(
        self, step: int, count: int, used: Set[int], latest: float
    ) -> list[tuple[int, bool]]:
        """Take problems by due date up to `latest`; each with whether it was solved."""
        taken: list[tuple[int, bool]] = []
        aside: list[int] = []
        while len(taken) < count and (first := self._pools.earliest()) is not None:
            problem, date = first
            if date > latest:
                break
            if self._eligible(problem, step, used):
                taken.append((problem, self._status[problem] in SOLVED_STATUS))
                self._take(problem, step)
            else:
                self._pools.take(problem)
                aside.append(problem)
        for problem in aside:
            self._pools.put(problem)
        return taken

    def _explore(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        picks: list[Pick] = []
        while len(picks) < count and (problem := self._draw(step, used)) is not None:
            self._take(problem, step)
            picks.append((problem, "explore"))
        return picks

    def _draw(self, step: int, used: Set[int]) -> int | None:
        """A uniform draw over the eligible problems; None if there is none."""
        if not any(self._available):
            return None
        start = 0
        for _ in range(EXPLORATION_TRIES):
            start = self._rng.randrange(self._problems)
            if self._eligible(start, step, used):
                return start
        # Eligible problems are rare: the next one from a random place.
        for offset in range(self._problems):
            problem = (start + offset) % self._problems
            if self._eligible(problem, step, used):
                return problem
        return None

    def _best(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        """At most `count` problems from heap and unseen, in the order of (expected) ω."""
        picks: list[Pick] = []
        from_heap: list[int] = []
        from_bag: list[int] = []
        while len(picks) < count:
            top = self._top(step, used, from_heap)
            chosen = top
            reason: Reason = "heap"
            if top is None or self.expected_omega > self._omega[top]:
                unseen = self._unseen(step, used, from_bag)
                if unseen is not None:
                    chosen, reason = unseen, "unseen"
            if chosen is None:
                break
            self._take(chosen, step)
            picks.append((chosen, reason))
        for problem in from_heap:
            self._heap.push(problem, self._omega[problem])
        for problem in from_bag:
            self._in_bag[problem] = 1
            self._bag.append(problem)
        return picks

    def _top(self, step: int, used: Set[int], aside: list[int]) -> int | None:
        """The eligible problem of greatest ω, left in the heap; others above it go aside."""
        while self._heap:
            problem, _ = self._heap.peek()
            if self._eligible(problem, step, used):
                return problem
            self._heap.pop()
            aside.append(problem)
        return None

    def _unseen(self, step: int, used: Set[int], aside: list[int]) -> int | None:
        """A random eligible unseen problem, out of the bag."""
        bag = self._bag
        while bag:
            place = self._rng.randrange(len(bag))
            problem = bag[place]
            bag[place] = bag[-1]
            bag.pop()
            self._in_bag[problem] = 0
            if self._status[problem] != UNSEEN or self._where[problem] != AVAILABLE:
                continue  # seen through exploration, or on its way: it comes back by itself
            if self._eligible(problem, step, used):
                return problem
            aside.append(problem)
        return None

    def _fall_back(self, step: int, count: int, used: Set[int]) -> list[Pick]:
        taken = [p for p, _ in self._by_due_date(step, count, used, latest=math.inf)]
        if len(taken) < count:
            cooling = [p for p in self._cooldown.oldest() if p not in used]
            for problem in cooling[: count - len(taken)]:
                self._take(problem, step)
                taken.append(problem)
        if taken and not self._said:
            self._said = True
            self._notices.append(FALLBACK_NOTICE)
        return [(problem, "fallback") for problem in taken]

    def state(self) -> dict[str, Any]:
        """Flat arrays, and the generator's state."""
        return {
            "rng": dump_random(self._rng),
            "heap": self._heap.state(),
            "pools": self._pools.state(),
            "cooldown": self._cooldown.state(),
            "omega": dump(self._omega),
            "eligible_from": dump(self._eligible_from),
            "status": bytes(self._status),
            "where": bytes(self._where),
            "bag": dump(self._bag),
            "in_bag": bytes(self._in_bag),
            "available": list(self._available),
            "in_flight": self._in_flight,
            "step": self._step,
            "first_visits": self._first_visits,
            "first_omega": self._first_omega,
            "carried": list(self._carried),
            "said": self._said,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Become the strategy that `state` was taken of."""
        load_random(self._rng, state["rng"])
        self._heap.load(state["heap"])
        self._pools.load(state["pools"])
        self._cooldown.load(state["cooldown"])
        self._omega = load("d", state["omega"])
        self._eligible_from = load("i", state["eligible_from"])
        self._status = bytearray(state["status"])
        self._where = bytearray(state["where"])
        self._bag = load("I", state["bag"])
        self._in_bag = bytearray(state["in_bag"])
        self._available = list(state["available"])
        self._in_flight = state["in_flight"]
        self._step = state["step"]
        self._first_visits = state["first_visits"]
        self._first_omega = state["first_omega"]
        self._carried = list(state["carried"])
        self._said = state["said"]
