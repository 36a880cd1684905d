"""`reprise check`: everything that can be known before any money is spent, in one pass.

Invariant: every mistake is one line that names the field or file, what was found and what to do;
nothing heavy is imported or started, and no mistake hides another.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from actors.rewards import validate_rewards
from actors.vllm_engine import check_settings
from deploy.local import budget
from deploy.local.model_files import check_model
from learner.deepspeed_config import check_learner
from protocol.config import Config, ConfigError, EvalConfig
from protocol.kafka import BrokerError, Kafka
from scheduler.problems import DataError, Problems

BROKER_SECONDS = 5.0
# Above so many training problems, reading each again to compare prompts takes too long.
MOST_COMPARED = 200_000


@dataclass
class Findings:
    """What a check found."""

    mistakes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: list[str] = field(default_factory=list)
    """Things worth knowing about a run that can start."""


def check(config: Config, *, offline: bool = False) -> Findings:
    """Look at everything that `config` names.

    Args:
        config: as `load_config` gives it.
        offline: reach for nothing outside this machine: no broker, no model hub.
    """
    found = Findings()
    _data(config, found)
    found.mistakes += check_model(config, offline=offline)
    _sections(config, found)
    _actors(config, found)
    _run_dir(config, found)
    budget.check(config, found.mistakes, found.facts)
    if config.kafka.embedded:
        _embedded(config, found)
    elif not offline:
        _broker(config, found)
    return found


def _data(config: Config, found: Findings) -> None:
    train = _load(config, "data.train", config.data.train, None, found)
    if train is not None:
        found.facts.append(f"data.train: {len(train):,} problems in {config.data.train}")
        if len(train) > MOST_COMPARED:
            found.facts.append("data.train: too many to look for held-out prompts among them")
        if len(train) < config.run.prompts_per_step:
            found.mistakes.append(
                f"run.prompts_per_step: {config.run.prompts_per_step} is more than the "
                f"{len(train)} problems of data.train ({config.data.train}); a problem is issued "
                "at most once a step"
            )
    for i, held_out in enumerate(config.eval):
        problems = _load(config, f"eval.{i}.data", held_out.data, held_out.limit, found)
        if problems is None:
            continue
        found.facts.append(f"eval {held_out.name}: {len(problems):,} problems in {held_out.data}")
        if train is not None and len(train) <= MOST_COMPARED:
            _overlap(train, problems, held_out, found)
        problems.close()
    if train is not None:
        train.close()


def _load(
    config: Config, name: str, path: Path, limit: int | None, found: Findings
) -> Problems | None:
    try:
        return Problems.load(
            path, config.data.fields, limit=limit, max_bytes=config.kafka.max_message_bytes
        )
    except DataError as error:
        found.mistakes.append(f"{name}: {error}")
        return None


def _overlap(train: Problems, problems: Problems, held_out: EvalConfig, found: Findings) -> None:
    trained = {_key(train, i) for i in range(len(train))}
    shared = sum(_key(problems, i) in trained for i in range(len(problems)))
    if shared:
        found.warnings.append(
            f"eval {held_out.name}: {shared} of {len(problems)} prompts are in data.train too; "
            "its accuracy is not a held-out figure"
        )


def _key(problems: Problems, index: int) -> int:
    # A hash a problem, so that the prompts of a large file need not lie in memory.
    prompt = problems[index].prompt
    return hash(prompt if isinstance(prompt, str) else tuple((t.role, t.content) for t in prompt))


def _sections(config: Config, found: Findings) -> None:
    """What each role says of its own part of the config."""
    for look in (validate_rewards, check_learner, check_settings):
        try:
            look(config)
        except ConfigError as error:
            found.mistakes += str(error).splitlines()


def _actors(config: Config, found: Findings) -> None:
    actors = config.actors
    if actors.count > actors.max:
        found.mistakes.append(
            f"actors.count: {actors.count} is more than actors.max ({actors.max}), for which "
            "`tasks` has partitions; raise actors.max"
        )
    if actors.count == 0:
        found.warnings.append("actors.count: 0, so actors must be started elsewhere")
    rounds = (config.run.max_lag + 1) * config.run.prompts_per_step
    if actors.count > rounds:
        found.warnings.append(
            f"actors.count: {actors.count}, but at most {rounds} groups are open at once "
            "((run.max_lag + 1) × run.prompts_per_step): some actors will idle"
        )


def _run_dir(config: Config, found: Findings) -> None:
    problem = unwritable(config.run.dir)
    if problem:
        found.mistakes.append(f"run.dir: {config.run.dir}: cannot be written: {problem}")


def unwritable(folder: Path) -> str:
    """Why nothing can be written below `folder`, or an empty text; leaves nothing behind."""
    created: list[Path] = []
    try:
        missing = [p for p in (folder, *folder.parents) if not p.exists()]
        for path in reversed(missing):
            path.mkdir()
            created.append(path)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return error.strerror or str(error)
    finally:
        for path in reversed(created):
            path.rmdir()
    return ""


def _embedded(config: Config, found: Findings) -> None:
    for name, value, only in (
        ("idempotence", config.kafka.idempotence, False),
        ("replication_factor", config.kafka.replication_factor, 1),
    ):
        if value is not None and value != only:
            found.mistakes.append(
                f"kafka.{name}: {str(value).lower()}, but the embedded broker can do only "
                f"{str(only).lower()}; leave it out or use another broker"
            )


def _broker(config: Config, found: Findings) -> None:
    quiet = logging.getLogger("aiokafka"), logging.getLogger("protocol.kafka")
    levels = [logger.level for logger in quiet]
    for logger in quiet:
        logger.setLevel(logging.CRITICAL)
    try:
        asyncio.run(_reach(config))
    except (BrokerError, ValueError, OSError) as error:
        found.mistakes.append(f"kafka.bootstrap_servers: {error}")
    finally:
        for logger, level in zip(quiet, levels, strict=True):
            logger.setLevel(level)


async def _reach(config: Config) -> None:
    kafka = Kafka(config.kafka, wait=min(BROKER_SECONDS, config.waits.kafka))
    admin = await kafka.admin()
    await admin.close()
