"""The exact held-out accuracy of a run's model, computed by `learner.exact` in its own process.

Invariant: it is computed only where it is the expected reward itself, that is where the one reward
is `exact` and the prompts reach the model as `learner.exact` encodes them; otherwise `obstacle`
says why not and the sampled figure stands.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deploy.local.model_files import has_chat_template
from deploy.local.process import GuardedProcess, describe_exit
from protocol.config import HUB, Config
from protocol.rundir import RunDir
from scheduler.problems import Problems

MEASURE_SECONDS = 1800.0
PERIOD_SECONDS = 0.05


class ExactFigures(msgspec.Struct, frozen=True):
    """What `python -m learner.exact --json` prints."""

    mean: float
    per_problem: list[float]
    by_data_source: dict[str, float]
    greedy: float
    entropy: float
    strata: list[str]


class ExactError(Exception):
    """The exact accuracy could not be computed."""


def obstacle(config: Config) -> str:
    """Why the exact accuracy is not defined for this run, or an empty text."""
    rewards = config.grading.rewards
    if not config.eval:
        return "there is no held-out set"
    if [r.name for r in rewards] != ["exact"]:
        return "the reward is not one right string (`exact`)"
    if config.model.path.startswith(HUB):
        return "the model lies on a hub"
    if config.rollout.stop:
        return "rollout.stop ends completions besides the end token"
    if config.model.chat_template == "never" and has_chat_template(Path(config.model.path)):
        return "model.chat_template: never is set aside"
    return ""


def write_problems(config: Config, run: RunDir) -> Path | None:
    """The first held-out set under the column names of `learner.exact`; None for chat prompts."""
    held_out = config.eval[0]
    problems = Problems.load(
        held_out.data,
        config.data.fields,
        limit=held_out.limit,
        max_bytes=config.kafka.max_message_bytes,
    )
    lines = []
    for i in range(len(problems)):
        problem = problems[i]
        if not isinstance(problem.prompt, str):
            return None
        row = {
            "id": problem.id,
            "prompt": problem.prompt,
            "answer": str(problem.answer).strip(),
            "data_source": problem.data_source,
        }
        lines.append(json.dumps(row, ensure_ascii=False))
    problems.close()
    path = folder(run) / "problems.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def folder(run: RunDir) -> Path:
    """Where the figures of a run lie."""
    return run.root / "exact"


def read_figures(run: RunDir, when: str) -> ExactFigures | None:
    """Figures computed earlier (`before` or `after`), None where there are none."""
    try:
        return msgspec.json.decode((folder(run) / f"{when}.json").read_bytes(), type=ExactFigures)
    except (OSError, msgspec.MsgspecError):
        return None


@dataclass
class ExactPass:
    """One running computation."""

    run: RunDir
    when: str
    process: GuardedProcess

    @classmethod
    def start(cls, config: Config, run: RunDir, when: str, model: Path) -> ExactPass:
        """Begin; `when` is `before` or `after`. `write_problems` came first."""
        command = [sys.executable, "-m", "learner.exact", "--json", "--model", str(model)]
        command += ["--data", str(folder(run) / "problems.jsonl")]
        command += ["--temperature", str(config.eval[0].temperature)]
        threads = str(config.learner.threads or 1)
        env = {**os.environ, "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        env |= {"TOKENIZERS_PARALLELISM": "false"}
        log = run.logs / f"exact-{when}.log"
        process = GuardedProcess(command, log, env, stdout=folder(run) / f"{when}.json")
        return cls(run, when, process)

    def result(
        self, timeout: float = MEASURE_SECONDS, cancelled: Callable[[], bool] = lambda: False
    ) -> ExactFigures:
        """Wait for the figures. Raises ExactError: none came, or `cancelled` became true."""
        deadline = time.monotonic() + timeout
        while (code := self.process.poll()) is None:
            if cancelled() or time.monotonic() > deadline:
                self.process.kill()
                why = "given up" if cancelled() else f"not there after {timeout:g} s"
                raise ExactError(f"exact accuracy {self.when}: {why}")
            time.sleep(PERIOD_SECONDS)
        figures = read_figures(self.run, self.when) if code == 0 else None
        if figures is None:
            raise ExactError(
                f"exact accuracy {self.when}: {describe_exit(code)}; the end of "
                f"{self.process.log}:\n{self.process.tail(5)}"
            )
        return figures

    def stop(self) -> None:
        """End it, finished or not."""
        self.process.kill()
