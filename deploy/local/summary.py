"""`summary.json`: what a run came to, for programs.

Invariant: a figure that was not measured is null, never a guess; `held_out_accuracy_kind` says how
the accuracy was measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from deploy.local.exact import ExactFigures
from deploy.local.history import History
from protocol.config import Config
from protocol.records import Accounts, EvalRecord
from protocol.rundir import RunDir, write_atomic

STRATA = ("always", "often", "seldom", "never")
ENDS_WINDOW = 10


def summarise(
    config: Config,
    run: RunDir,
    history: History,
    *,
    before: ExactFigures | None,
    after: ExactFigures | None,
    wall_seconds: float,
) -> dict[str, Any]:
    """The content of summary.json.

    Args:
        before, after: exact figures of the base and of the trained model, where computed.
        wall_seconds: of the whole command, start-up and measurements included.
    """
    evals = history.evals_of(config.eval[0].name) if config.eval else []
    end = history.end
    exact = before is not None and after is not None
    sampled = _sampled(evals, before if exact else None, after if exact else None)
    return {
        "run_id": run.identity.run,
        "base_model": shown(config.model.path),
        "exported_model": shown(run.model) if run.model.is_dir() else None,
        "held_out": shown(config.eval[0].data) if config.eval else None,
        "held_out_accuracy": (
            _pair(before, after, "mean")
            if exact
            else {"before": sampled["before"], "after": sampled["after"]}
        ),
        "held_out_accuracy_kind": "exact" if exact else ("sampled" if evals else None),
        "sampled": sampled,
        "greedy_accuracy": (
            _pair(before, after, "greedy") if exact else _first_last([e.greedy for e in evals])
        ),
        "entropy": _pair(before, after, "entropy") if exact else _entropy(history),
        "accuracy_by_stratum": by_stratum(before, after),
        "steps": history.done,
        "rollouts": history.rollouts,
        "seconds": training_seconds(history),
        "wall_seconds": round(wall_seconds, 1),
        "seed": config.run.seed,
        "strategy": config.strategy.name,
        "accounts": _accounts(history),
        "impure_groups_trained": impure(history),
        "tokens_per_second": {
            "actor": actor_rate(history),
            "learner": learner_rate(history),
        },
        "end": None if end is None else {"reason": end.reason, "detail": end.detail},
    }


def write_summary(run: RunDir, summary: dict[str, Any]) -> None:
    """Write summary.json."""
    write_atomic(run.summary, json.dumps(summary, indent=2).encode() + b"\n")


def shown(path: Path | str) -> str:
    """A path relative to the working directory where it lies under it."""
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def by_stratum(
    before: ExactFigures | None, after: ExactFigures | None
) -> dict[str, dict[str, float | int]] | None:
    """Mean exact accuracy before and after over the problems that began in each stratum."""
    if before is None or after is None:
        return None
    result: dict[str, dict[str, float | int]] = {}
    for name in STRATA:
        chosen = [i for i, stratum in enumerate(before.strata) if stratum == name]
        if chosen:
            result[name] = {
                "before": _mean(before.per_problem[i] for i in chosen),
                "after": _mean(after.per_problem[i] for i in chosen),
                "problems": len(chosen),
            }
    return result


def training_seconds(history: History) -> float | None:
    """Log time from the start of the first step to the end of the last, evaluations included."""
    if not history.steps:
        return None
    first, last = history.steps[0], history.steps[-1]
    start = max(0.0, first.seconds - sum(first.waited.values()))
    return round(last.seconds - start, 1)


def actor_rate(history: History) -> float | None:
    """Tokens sampled per second in which an actor generated, evaluation included."""
    if history.end is None:
        return None
    actors = history.end.actors.values()
    tokens = sum(actor.get("tokens", 0.0) for actor in actors)
    return _rate(tokens, sum(actor.get("generating", 0.0) for actor in actors))


def learner_rate(history: History) -> float | None:
    """Prompt and completion tokens trained per second of training, all ranks together."""
    learner = [step.learner for step in history.steps]
    tokens = sum(m.get("tokens", 0.0) + m.get("prompt_tokens", 0.0) for m in learner)
    return _rate(tokens, sum(m.get("seconds_train", 0.0) for m in learner))


def impure(history: History) -> int:
    """Trained groups whose spans did not prove one version equal to the step's."""
    if history.end is not None:
        return history.end.impure_groups_trained
    return int(sum(step.learner.get("impure_trained", 0.0) for step in history.steps))


def accounts(history: History) -> Accounts | None:
    """The newest accounts."""
    if history.end is not None:
        return history.end.accounts
    return history.steps[-1].accounts if history.steps else None


def _accounts(history: History) -> dict[str, Any] | None:
    newest = accounts(history)
    if newest is None:
        return None
    return {
        "issued": newest.issued,
        "in_flight": newest.in_flight,
        "ends": newest.ends,
        "zero_variance": newest.zero_variance,
    }


def _sampled(
    evals: Sequence[EvalRecord], before: ExactFigures | None, after: ExactFigures | None
) -> dict[str, Any]:
    # One evaluation alone says nothing about what came after it.
    first, last = (evals[0] if evals else None, evals[-1] if len(evals) > 1 else None)
    return {
        "at_step": {
            "before": None if first is None else first.version.step,
            "after": None if last is None else last.version.step,
        },
        "n": None if first is None else first.n,
        "before": None if first is None else first.mean,
        "after": None if last is None else last.mean,
        "standard_error": {
            "before": None if first is None else _standard_error(first, before),
            "after": None if last is None else _standard_error(last, after),
        },
        "passed": _first_last([e.passed for e in evals]),
    }


def _standard_error(record: EvalRecord, exact: ExactFigures | None) -> float | None:
    """Of mean@n: sqrt(Σ p(1−p) / n) / problems, with p itself where it is known.

    The estimate from the samples alone is small just where the mean came out large, near p = 1.
    """
    if exact is None:
        return record.standard_error
    variance = sum(p * (1 - p) for p in exact.per_problem) / record.n
    return math.sqrt(variance) / len(exact.per_problem)


def _pair(
    before: ExactFigures | None, after: ExactFigures | None, name: str
) -> dict[str, float | None]:
    return {"before": getattr(before, name, None), "after": getattr(after, name, None)}


def _first_last(values: Sequence[float | None]) -> dict[str, float | None]:
    return {
        "before": values[0] if values else None,
        "after": values[-1] if len(values) > 1 else None,
    }


def _entropy(history: History) -> dict[str, float | None]:
    values = [step.learner["entropy"] for step in history.steps if "entropy" in step.learner]
    if not values:
        return {"before": None, "after": None}
    return {"before": _mean(values[:ENDS_WINDOW]), "after": _mean(values[-ENDS_WINDOW:])}


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _rate(amount: float, seconds: float) -> float | None:
    return round(amount / seconds, 1) if seconds > 0 else None
