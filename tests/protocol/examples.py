"""One valid message of every type, with every field away from its default."""

from __future__ import annotations

import hashlib

from protocol.arrays import pack_float32, pack_int32
from protocol.messages import (
    Assigned,
    BatchGroup,
    BatchReleased,
    ChatMessage,
    Completion,
    EngineDied,
    GroupEnd,
    GroupRef,
    Heartbeat,
    Held,
    Joined,
    LearnerReady,
    Message,
    Outcome,
    Rejoin,
    Released,
    RewardGroup,
    RunEnded,
    SchedulerStarted,
    SnapshotWritten,
    Started,
    StepCompleted,
    StopRequested,
    Task,
    Tick,
    WeightsPublished,
)
from protocol.versions import Span, Version

V0, V1 = Version(2, 7), Version(2, 8)
DIGEST = hashlib.sha256(b"group").digest()
REF = GroupRef(3, 41, DIGEST)

TASK = Task(
    id="2-17",
    attempt=2,
    actor="actor-0.a1",
    problem="p",
    purpose="train",
    reason="retest_solved",
    version=V1,
    group_size=4,
    temperature=0.7,
    max_tokens=12,
    seed=99,
    prompt=[ChatMessage("system", "be brief"), ChatMessage("user", "1+1=")],
    answer={"value": [2, 2.5, None, True]},
    data_source="sums",
    extra={"level": 3, "note": "ä"},
    send="all",
    exact=True,
    alone=True,
)
GRADED = Completion(
    tokens=pack_int32([5, 6, -7]),
    logprobs=pack_float32([-0.5, -0.25, 0.0]),
    spans=[Span(V0, 0, 1), Span(V1, 1, 3)],
    finish="length",
    reward=-1.5,
    correct=0.25,
    components={"format": 1.0},
)
UNGRADED = Completion(tokens=b"", logprobs=b"", spans=[], finish="stop", reward=None, correct=None)
GROUP = RewardGroup(
    task="2-17",
    attempt=2,
    actor="actor-0.a1",
    problem="p",
    data_source="sums",
    reason="heap",
    temperature=0.7,
    prompt_tokens=pack_int32([1, 2]),
    completions=[GRADED, UNGRADED],
)
OUTCOME = Outcome(
    actor="actor-0.a1",
    task="2-17",
    attempt=2,
    status="ok",
    rewards=[1.0, None],
    correct=[0.5, None],
    lengths=[3, 0],
    truncated=[True, False],
    oldest=V0,
    newest=V1,
    group=REF,
    components={"format": 0.5},
    prompt_length=2,
    generate_seconds=1.5,
    grade_seconds=0.25,
)
FAILED = Outcome(actor="a", task="2-18", attempt=1, status="failed", why="prompt too long")

MESSAGES: list[Message] = [
    TASK,
    Assigned(actor="a", partition=1),
    Rejoin(actor="a"),
    RunEnded(reason="nothing_left_to_learn", detail="3 empty rounds"),
    GROUP,
    Joined(actor="a", slots=8, version=V0, host="h", pid=4),
    Started(actor="a", task="2-17", attempt=1),
    Heartbeat(
        actor="a",
        state="generating",
        version=V1,
        held=[Held("2-17", 1)],
        tokens=5,
        seconds={"idle": 0.5},
    ),
    Released(actor="a", attempts=[Held("2-17", 1)], why="draining"),
    EngineDied(actor="a", attempts=[Held("2-17", 1), Held("2-18", 3)], error="signal 9"),
    OUTCOME,
    FAILED,
    Tick(epoch=3, seconds=1.25),
    SchedulerStarted(epoch=3, host="h", pid=4),
    StepCompleted(
        version=V0,
        ends=[GroupEnd("2-17", 2, "trained"), GroupEnd("2-18", 1, "failed", "not found")],
        metrics={"loss": -0.125},
        checkpoint=True,
    ),
    LearnerReady(version=V0, ranks=2, host="h", pid=4, checkpoint="c/2.7", sha256="ab"),
    StopRequested(sender="learner", reason="error", detail="d"),
    BatchReleased(version=V0, groups=[BatchGroup("2-17", 2, REF)], planned=2),
    SnapshotWritten(version=V0, sha256="ab"),
    WeightsPublished(version=V0, path="2.7", files={"model.safetensors": "ab"}, bytes=9),
]
