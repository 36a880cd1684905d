"""The rounds that are open: how many groups each still wants, and which groups make a batch.

Round s exists to give the batch of step s its `planned` groups. Each of its places holds a task
(`alive`: issued and not ended), or is owed a first pick (`owed`: the strategy had none when the
round was picked), or wants a replacement (`vacant`), or was given up. Invariant: alive + owed +
vacant ≤ planned, and replacements issued ≤ max_refill.

Which groups a batch takes, and why none becomes too old. A batch takes ready groups of all open
rounds, oldest version first, then in the order of issue. Tasks of its own round that it leaves
behind move on: what remains is dealt to the later rounds in the same order. At current step c and
lag L, a task issued at version v may be trained in batches up to v + L. So the batch of step c is
held back while, for any v in [c − L, c), more tasks of versions ≤ v would remain than the batches
c+1 … v+L can take: remaining(≤ v) ≤ planned · (v + L − c). For v = c − L this is the design's rule
that no group issued at step c − L may be without an outcome; for L ≥ 2 the further ones keep fast
young groups from crowding out slow old ones. Tasks issued at v belong to rounds ≤ v + L, so the
condition holds again once the old ones have their outcomes: waiting for them always suffices.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scheduler.accounts import Task


def age_key(task: Task) -> tuple[int, int]:
    """Oldest version first, then the order of issue."""
    return task.version.step, task.number


class Round:
    """The round of one step.

    Attributes:
        step: of its batch.
        selected: whether the strategy made its first selection.
        owed, vacant: places without a task, see the module.
        refills: replacements issued.
        places: tasks issued; the next one's place.
        used: problems issued for this step, also for an empty round before this one.
        alive: its tasks that have not ended, by id, in the order of issue.
        waiting: how many of them have no outcome.
        dry: the strategy had nothing to offer, and nothing has changed since.
        replays: tasks whose problem had been visited before.
        ends: how its tasks ended, for an empty round.
    """

    __slots__ = (
        "alive",
        "dry",
        "ends",
        "owed",
        "places",
        "refills",
        "replays",
        "selected",
        "step",
        "used",
        "vacant",
        "waiting",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.selected = False
        self.owed = 0
        self.vacant = 0
        self.refills = 0
        self.places = 0
        self.used: set[int] = set()
        self.alive: dict[str, Task] = {}
        self.waiting = 0
        self.dry = False
        self.replays = 0
        self.ends: dict[str, int] = {}

    def again(self) -> None:
        """It came out empty: a new round for the same step, with a new refill."""
        self.selected = False
        self.owed = self.vacant = self.refills = 0
        self.dry = False
        self.ends = {}

    def add(self, task: Task) -> None:
        """A task takes one of its places."""
        task.step = self.step
        self.alive[task.id] = task
        self.used.add(task.problem)
        if not task.got:
            self.waiting += 1

    def remove(self, task: Task) -> None:
        """A task ended, or moves on."""
        del self.alive[task.id]
        if not task.got:
            self.waiting -= 1

    def state(self) -> list[Any]:
        """What `from_state` needs."""
        return [
            self.step,
            self.selected,
            self.owed,
            self.vacant,
            self.refills,
            self.places,
            sorted(self.used),
            list(self.alive),
            self.dry,
            self.replays,
            dict(self.ends),
        ]

    @classmethod
    def from_state(cls, state: list[Any], tasks: dict[str, Task]) -> Round:
        """The round that `state` was taken of."""
        new = cls(state[0])
        new.selected, new.owed, new.vacant, new.refills, new.places = state[1:6]
        new.used = set(state[6])
        new.alive = {name: tasks[name] for name in state[7]}
        new.waiting = sum(not task.got for task in new.alive.values())
        new.dry, new.replays, new.ends = state[8], state[9], dict(state[10])
        return new


def held_up_by(tasks: Iterable[Task], step: int, lag: int, planned: int, size: int) -> list[Task]:
    """The tasks without outcome for which a batch of `size` ready groups has to wait.

    Args:
        tasks: all that are open (issued, not ended, not at the learner).
        step: of the batch.
        lag: largest allowed age L in steps.
        planned: groups of a full batch.
        size: how many ready groups the batch would take, the oldest first.

    Empty where the batch may go; see the module for the condition.
    """
    old = sorted((task for task in tasks if task.version.step < step or lag == 0), key=age_key)
    for version in range(step - lag, max(step, step - lag + 1)):
        upto = [task for task in old if task.version.step <= version]
        late = [task for task in upto if not task.got]
        remaining = len(upto) - min(size, len(upto) - len(late))
        if late and remaining > planned * (version + lag - step):
            return late
    return []


def deal(rounds: list[Round], taken: list[Task], current: Round, planned: int) -> None:
    """Take a batch out of the rounds, and deal what remains to the later ones.

    Args:
        rounds: the later rounds, by step.
        taken: the groups of the batch.
        current: the round of the batch; it is empty afterwards.
        planned: groups of a full batch.

    A later round whose groups were taken gets tasks of `current` in exchange; where those do not
    suffice its places become vacant.
    """
    sizes = [len(later.alive) for later in rounds]
    for task in taken:
        (current if task.id in current.alive else _round_of(rounds, task)).remove(task)
    if not current.alive and all(
        len(later.alive) == size for later, size in zip(rounds, sizes, strict=True)
    ):
        return
    remaining = sorted(
        (task for each in (current, *rounds) for task in each.alive.values()), key=age_key
    )
    for each in (current, *rounds):
        for task in list(each.alive.values()):
            each.remove(task)
    for later, size in zip(rounds, sizes, strict=True):
        dealt, remaining = remaining[:size], remaining[size:]
        for task in dealt:
            later.add(task)
        later.vacant += size - len(dealt)
    # The last rounds of a run have none after them.
    for task in remaining:
        current.add(task)


def _round_of(rounds: list[Round], task: Task) -> Round:
    return next(each for each in rounds if task.id in each.alive)
