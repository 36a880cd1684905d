"""The command line and the environment of each process of a run on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploy.local.supervisor import ChildSpec
from protocol.config import HUB, Config
from protocol.rundir import RunDir

BOOTSTRAP = "REPRISE_KAFKA_BOOTSTRAP_SERVERS"
PASSWORD = "REPRISE_KAFKA_SASL_PASSWORD"


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The NVIDIA GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name not in ("", "-1")]
    return sorted(path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))


def placement(config: Config, devices: list[str]) -> dict[str, list[str]]:
    """GPUs by process: the learner's ranks first, then the actors; empty where they must share."""
    engine = config.actors.engine
    each = _count(engine, "tensor_parallel_size") * _count(engine, "pipeline_parallel_size")
    ranks = config.learner.ranks
    if len(devices) < ranks + each * config.actors.count:
        return {}
    placed = {"learner": devices[:ranks]}
    for i in range(config.actors.count):
        start = ranks + i * each
        placed[f"actor-{i}"] = devices[start : start + each]
    return placed


def _count(engine: dict[str, Any], name: str) -> int:
    value = engine.get(name, 1)
    return value if isinstance(value, int) else 1


def specs(config: Config, run: RunDir, environ: Mapping[str, str]) -> list[ChildSpec]:
    """Scheduler, learner and actors, in the order in which they are started."""
    devices = gpus(environ)
    placed = placement(config, devices)
    base = _base(config, environ, on_cpu=not devices)
    scheduler = ChildSpec("scheduler", "scheduler", _command("scheduler", run), base)
    learner = ChildSpec(
        "learner",
        "learner",
        _command("learner", run),
        base | _threads(config.learner.threads) | _devices(placed.get("learner")),
    )
    actors = [
        ChildSpec(
            name,
            "actor",
            [*_command("actors", run), "--name", name],
            _engine(base, on_cpu=not devices)
            | _threads(config.actors.threads)
            | _devices(placed.get(name)),
        )
        for name in (f"actor-{i}" for i in range(config.actors.count))
    ]
    return [scheduler, learner, *actors]


def _command(module: str, run: RunDir) -> list[str]:
    return [sys.executable, "-m", module, "--run-dir", str(run.root)]


def _base(config: Config, environ: Mapping[str, str], *, on_cpu: bool) -> dict[str, str]:
    env = {name: value for name, value in environ.items() if name != BOOTSTRAP}
    # The run directory holds no secret: what the config file gave goes by the environment.
    if config.kafka.sasl_password is not None:
        env[PASSWORD] = config.kafka.sasl_password.get_secret_value()
    env["TOKENIZERS_PARALLELISM"] = "false"
    env["PYTHONUNBUFFERED"] = "1"
    if not config.model.path.startswith(HUB):
        env["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        env["DS_ACCELERATOR"] = "cpu"
    return env


def _engine(base: dict[str, str], *, on_cpu: bool) -> dict[str, str]:
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"} | base
    if on_cpu:
        # Binding threads to cores makes two engines on one machine fight for the same ones.
        env = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"} | env
    return env


def _threads(count: int | None) -> dict[str, str]:
    return {} if count is None else {"OMP_NUM_THREADS": str(count)}


def _devices(names: list[str] | None) -> dict[str, str]:
    return {} if names is None else {"CUDA_VISIBLE_DEVICES": ",".join(names)}
