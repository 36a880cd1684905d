"""A run directory as a finished run leaves it, with invented figures."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import yaml

from protocol.config import Config, dump_config, load_config
from protocol.messages import RunEndReason
from protocol.records import (
    Accounts,
    EndRecord,
    EvalRecord,
    ReasonCount,
    RunRecord,
    StepRecord,
    to_line,
)
from protocol.rundir import RunDir, RunIdentity
from protocol.versions import Version

PROMPTS, GROUP, PROBLEMS = 16, 16, 1500
SOURCES = ("add-1+1", "add-2+2", "add-3+3", "add-5+5")


def config(folder: Path, steps: int) -> Config:
    """A config over a model directory and data that exist."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 64}')
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    for name, count in (("train", 40), ("held_out", 8)):
        rows = (
            {"id": f"{name}-{i}", "prompt": f"{name} {i}=", "answer": str(i), "data_source": "add"}
            for i in range(count)
        )
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = {
        "run": {"name": "canned", "dir": str(folder / "runs"), "steps": steps},
        "model": {"path": "model"},
        "data": {"train": "train.jsonl"},
        "eval": [{"data": "held_out.jsonl", "every": 25}],
        "rollout": {"group_size": GROUP, "max_tokens": 8, "max_prompt_tokens": 16},
        "actors": {"count": 2},
        "kafka": {"bootstrap_servers": "127.0.0.1:1"},
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load_config(path)


def records(
    steps: int, *, ended: bool = True, reason: RunEndReason = "finished"
) -> list[RunRecord]:
    """What the scheduler writes in a run of `steps` steps, evaluated every 25."""
    rng = random.Random(0)
    found: list[RunRecord] = [evaluation(0, steps, 2.0)]
    issued, rollouts = 400, 0
    for step in range(steps):
        zero = 5 + int(6 * step / steps) + rng.randrange(3)
        issued += PROMPTS + zero
        rollouts += GROUP * (PROMPTS + zero)
        found.append(_step(rng, step, steps, zero, issued, rollouts))
        if (step + 1) % 25 == 0 or step + 1 == steps:
            found.append(evaluation(step + 1, steps, 4.0 + 1.5 * step))
    if ended:
        last = found[-2]
        assert isinstance(last, StepRecord)
        found.append(_end(last, steps, reason))
    return found


def _step(
    rng: random.Random, step: int, steps: int, zero: int, issued: int, rollouts: int
) -> StepRecord:
    progress = step / steps
    groups = PROMPTS + zero
    noise = rng.gauss(0, 0.05)
    seen = min(PROBLEMS, 12 * step)
    return StepRecord(
        version=Version(0, step),
        seconds=3.0 + 1.5 * (step + 1),
        rollouts=rollouts,
        rollout_tokens=5 * rollouts,
        groups=PROMPTS,
        planned=PROMPTS,
        trained=PROMPTS,
        reward_trained=0.5 + noise,
        reward_explored=None if step % 7 == 6 else 0.4 + 0.22 * progress + 2 * noise,
        zero_variance_share=zero / groups,
        replay_share=min(0.7, progress),
        mean_abs_advantage=0.4,
        by_reason={
            "heap": ReasonCount(groups=9, mixed=8, zero_variance=1, reward=4.5, correct=4.5),
            "explore": ReasonCount(groups=4, mixed=2, zero_variance=2, reward=1.7, correct=1.7),
            "refill": ReasonCount(groups=zero, mixed=zero, reward=2.0, correct=2.0),
        },
        pools={
            "unseen": PROBLEMS - seen,
            "heap": seen // 2,
            "solved": seen // 4,
            "unsolved": seen - seen // 2 - seen // 4,
        },
        distinct_problems=seen,
        most_visits=1 + step // 12,
        lag={"0": PROMPTS},
        accounts=Accounts(
            issued=issued,
            in_flight=3,
            ends={
                "trained": PROMPTS * (step + 1),
                "zero_variance": issued - 403 - PROMPTS * (step + 1),
                "evaluated": 400,
            },
        ),
        learner={
            "entropy": 0.9 * math.exp(-progress) + 0.02 * rng.random(),
            "grad_norm": 0.6 + 0.2 * rng.random(),
            "length_mean": 4.5 + 0.2 * rng.random(),
            "tokens": 1200.0,
            "prompt_tokens": 1500.0,
            "seconds_wait": 0.8,
            "seconds_assemble": 0.02,
            "seconds_train": 0.5,
            "seconds_publish": 0.1,
        },
        waited={"rollouts": 0.85, "learner": 0.6, "evaluation": 0.05},
    )


def evaluation(step: int, steps: int, seconds: float, name: str = "held_out") -> EvalRecord:
    progress = math.sqrt(step / steps)
    mean = 0.39 + 0.22 * progress
    return EvalRecord(
        name=name,
        version=Version(0, step),
        seconds=seconds,
        rollouts=GROUP * 25 * step,
        problems=449,
        failed=0,
        n=4,
        mean=mean,
        standard_error=0.012,
        passed=0.7 + 0.05 * progress,
        greedy=0.72 - 0.03 * progress,
        by_source={
            source: {"mean": 0.9 - 0.25 * i + 0.1 * progress, "problems": 100}
            for i, source in enumerate(SOURCES)
        },
    )


def _end(last: StepRecord, steps: int, reason: RunEndReason) -> EndRecord:
    return EndRecord(
        reason=reason,
        detail="" if reason == "finished" else "no outcome for 3600 s",
        version=Version(0, steps),
        seconds=last.seconds + 5,
        rollouts=last.rollouts,
        rollout_tokens=last.rollout_tokens,
        trained_tokens=1200 * steps,
        impure_groups_trained=0,
        accounts=Accounts(
            issued=last.accounts.issued,
            in_flight=0,
            ends=last.accounts.ends | {"surplus": last.accounts.in_flight},
            zero_variance={"all_right": 5, "all_wrong": 2, "truncated": 1},
        ),
        actors={
            f"actor-{i}": {"tasks": 900.0, "tokens": 60000.0, "generating": 150.0, "idle": 90.0}
            for i in range(2)
        },
    )


def run_dir(folder: Path, steps: int = 100, *, ended: bool = True, exact: bool = True) -> RunDir:
    """A whole run directory below `folder`."""
    used = config(folder, steps)
    run = RunDir(folder / "runs" / "canned-1")
    run.create(RunIdentity("canned-1", 1))
    dump_config(used, run.config)
    run.metrics.write_bytes(b"".join(map(to_line, records(steps, ended=ended))))
    if exact:
        (run.root / "exact").mkdir()
        for when, shift in (("before", 0.0), ("after", 0.2)):
            (run.root / "exact" / f"{when}.json").write_text(json.dumps(exact_figures(shift)))
    return run


def exact_figures(shift: float) -> dict[str, object]:
    """What learner.exact prints for eight problems; `shift` is gained where it can be."""
    start = [0.99, 0.95, 0.8, 0.6, 0.4, 0.1, 0.001, 0.0]
    values = [min(1.0, p + shift) if p >= 0.01 else p for p in start]
    strata = ["always"] * 2 + ["often"] * 2 + ["seldom"] * 2 + ["never"] * 2
    return {
        "mean": sum(values) / len(values),
        "per_problem": values,
        "by_data_source": dict(zip(SOURCES, values[1::2], strict=True)),
        "greedy": 0.72 - shift / 10,
        "entropy": 0.5 - shift,
        "strata": strata,
        "by_stratum": {},
    }
