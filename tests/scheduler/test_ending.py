"""How a run ends, and what runs on log time."""

from __future__ import annotations

from typing import Any

from protocol.messages import (
    Heartbeat,
    Held,
    Joined,
    LearnerReady,
    Outcome,
    Released,
    RunEnded,
    SchedulerStarted,
    StopRequested,
    Tick,
)
from protocol.records import EndRecord
from protocol.versions import Version
from scheduler.commands import Command, IssueTask, Leave, Say, SendBatch, SendControl, WriteRecord
from tests.scheduler.driving import Driven, completed, config, of, outcome


def driven(actors: Any = ("a",), waits: Any = None, **run: Any) -> Driven:
    plain = {"lease": 10_000, "drain": 20}
    return Driven(config(run=run, waits={**plain, **(waits or {})}), actors=actors)


def ended(commands: list[Command]) -> list[RunEnded]:
    """RunEnded, as it is sent to both: first to the learner, then to the actors."""
    sent = [c.message for c in commands if isinstance(c, SendBatch | SendControl)]
    return [message for message in sent if isinstance(message, RunEnded)]


def end_record(d: Driven) -> EndRecord:
    (record,) = [c.record for c in of(WriteRecord, d.log) if isinstance(c.record, EndRecord)]
    return record


def test_a_stop_lets_the_step_at_the_learner_finish_then_ends() -> None:
    d = driven()
    batch = d.batch(*[outcome(task) for task in d.ready()])
    assert ended(d.apply(StopRequested(sender="scheduler", detail="SIGTERM"))) == []
    assert d.core.waiting_for == "last optimizer step"
    commands = d.apply(completed(batch))
    assert ended(commands) == [RunEnded(reason="stopped", detail="SIGTERM")] * 2
    assert of(IssueTask, commands) == []
    assert d.log[-1] == Leave(True)
    assert isinstance(d.log[-2], WriteRecord)
    assert d.ends == {"trained": 2}
    assert end_record(d).version == Version(0, 1)


def test_a_stop_waits_for_that_step_no_longer_than_drain() -> None:
    d = driven()
    d.batch(*[outcome(task) for task in d.ready()])
    d.apply(StopRequested(sender="scheduler"))
    assert ended(d.wait(19)) == []
    assert len(ended(d.wait(1))) == 2
    assert of(Leave, d.wait(19)) == []
    assert of(Leave, d.wait(1)) == [Leave(True)]
    assert d.ends == {"expired": 2}


def test_a_learner_that_stops_itself_has_dropped_its_batch() -> None:
    d = driven()
    d.batch(*[outcome(task) for task in d.ready()])
    commands = d.apply(StopRequested(sender="learner", reason="error", detail="loss"))
    assert ended(commands) == [RunEnded(reason="error", detail="loss")] * 2
    assert commands[-1] == Leave(False)
    assert d.ends == {"surplus": 2}


def test_what_actors_hold_ends_surplus_as_it_is_released_or_finishes() -> None:
    d = driven(prompts_per_step=3)
    first, second, third = d.ready()
    d.apply(outcome(first))
    d.apply(StopRequested(sender="scheduler"))
    assert d.ends == {"surplus": 1}
    assert d.core.waiting_for == "work in flight"
    d.apply(outcome(second))
    commands = d.apply(Released(actor="a", attempts=[Held(third.id, 1)]))
    assert of(Leave, commands) == [Leave(True)]
    assert d.ends == {"surplus": 3}
    assert end_record(d).accounts == d.core.accounts


def test_what_does_not_come_back_within_drain_expires() -> None:
    d = driven()
    d.ready()
    d.apply(StopRequested(sender="scheduler"))
    assert of(Leave, d.wait(19)) == []
    assert of(Leave, d.wait(1)) == [Leave(True)]
    assert d.ends == {"expired": 2}
    assert d.core.accounts.in_flight == 0


def test_tasks_that_wait_for_an_actor_end_at_once() -> None:
    d = driven(actors=())
    d.ready()
    assert of(Leave, d.apply(StopRequested(sender="scheduler"))) == [Leave(True)]
    assert d.ends == {"surplus": 2}


def test_after_the_end_nobody_joins_and_nothing_is_said() -> None:
    d = driven()
    first, _ = d.ready()
    d.apply(StopRequested(sender="scheduler"))
    assert d.apply(Joined(actor="late", slots=1, version=Version(0, 0))) == []
    assert d.apply(LearnerReady(version=Version(1, 0))) == []
    d.wait(20)
    assert d.apply(outcome(first), StopRequested(sender="learner")) == []
    assert d.core.counters["StopRequested"] == 2


def test_a_stop_before_the_learner_is_ready_ends_the_run() -> None:
    d = driven()
    assert of(Leave, d.apply(StopRequested(sender="scheduler"))) == [Leave(True)]
    assert end_record(d).accounts.issued == 0


def test_the_end_record_tells_what_each_actor_did() -> None:
    d = driven(steps=1)
    tasks = d.ready()
    d.apply(
        Heartbeat(actor="a", state="idle", version=Version(0, 0), tokens=9, seconds={"idle": 4.0})
    )
    batch = d.batch(*[outcome(task) for task in tasks])
    d.apply(completed(batch, tokens=12.0, impure_trained=0.0))
    record = end_record(d)
    assert record.reason == "finished"
    assert record.actors == {"a": {"tasks": 2, "tokens": 9, "idle": 4.0}}
    assert (record.rollouts, record.rollout_tokens, record.trained_tokens) == (4, 12, 12)
    assert record.impure_groups_trained == 0


def test_no_outcome_and_no_step_for_so_long_ends_the_run() -> None:
    d = driven(waits={"no_progress": 100})
    first, _ = d.ready()
    d.wait(90)
    d.apply(outcome(first))
    assert ended(d.wait(99)) == []
    commands = d.wait(1)
    assert [message.reason for message in ended(commands)] == ["no_progress"] * 2
    assert "2 of 2 tasks in flight" in ended(commands)[0].detail
    assert of(Leave, d.wait(20)) == [Leave(False)]


def test_time_without_an_actor_is_reported_and_is_no_lack_of_progress() -> None:
    d = driven(actors=(), waits={"no_progress": 50, "first_actor": 30})
    d.ready()
    said = [say for say in of(Say, d.wait(95)) if say.level == "error"]
    assert len(said) == 3
    assert "no actor has joined for 30 s" in said[0].text
    assert ended(d.log) == []


def test_log_time_is_the_sum_of_the_current_schedulers_ticks() -> None:
    d = driven()
    d.apply(Tick(epoch=1, seconds=1.5), Tick(epoch=0, seconds=2.0), Tick(epoch=2, seconds=2.0))
    assert d.core.seconds == 1.5
    d.apply(SchedulerStarted(epoch=2, host="b", pid=2), Tick(epoch=2, seconds=0.25))
    d.apply(SchedulerStarted(epoch=1, host="a", pid=1), Tick(epoch=1, seconds=2.0))
    assert d.core.seconds == 1.75


def test_a_learner_beyond_the_last_step_is_put_aside() -> None:
    d = driven(steps=3)
    d.apply(LearnerReady(version=Version(0, 4)))
    assert d.core.version is None
    assert d.core.notes["dead_letters"] == 1


def test_outcomes_of_tasks_that_were_never_issued_change_nothing() -> None:
    d = driven()
    d.ready()
    before = d.core.accounts
    for task in ("0-2", "1-0", "x", "-", "0-"):
        d.apply(Outcome(actor="a", task=task, attempt=1, status="failed", why="?"))
    assert d.core.accounts == before
