"""`python -m scheduler --run-dir DIR`: the scheduler process of a run.

Exit codes: 0 the run ended as it should, 1 an error, 2 bad input, 70 the main loop hung. The last
line on stderr says what was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from protocol.config import Config, ConfigError, load_config
from protocol.http import MonitorServer
from protocol.kafka import BrokerError, Kafka
from protocol.loops import MainWatch
from protocol.rundir import RunDir
from scheduler.core import Core
from scheduler.evaluation import EvalSet
from scheduler.monitor import Monitor
from scheduler.problems import DataError, Problems
from scheduler.service import RunFileError, Service

log = logging.getLogger("scheduler")

OK, ERROR, BAD_INPUT = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Run the scheduler of one run directory. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m scheduler", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="run directory, runs/<id>")
    run_dir = RunDir(parser.parse_args(arguments).run_dir.absolute())
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("aiokafka").setLevel(logging.WARNING)
    try:
        config = load_config(run_dir.config)
        _require_run(run_dir, config)
        return OK if asyncio.run(serve(config, run_dir)) else ERROR
    except (ConfigError, DataError) as error:
        log.error("%s", error)
        return BAD_INPUT
    except (BrokerError, RunFileError, OSError) as error:
        log.error("%s", error)
        return ERROR
    except Exception as error:
        log.exception("unexpected")
        log.error("%s: %s", type(error).__name__, error)
        return ERROR


async def serve(config: Config, run_dir: RunDir) -> bool:
    """Load the data, serve until the run is over. Returns whether it ended as it should."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    problems = await asyncio.to_thread(load_problems, config)
    core = Core(config, len(problems[None]), eval_sets(config, problems))
    # What is loaded for good need not be looked through at every garbage collection.
    gc.collect()
    gc.freeze()
    registry = CollectorRegistry()
    monitor = Monitor(registry, core, config.waits.main)
    with _watched(config), _served(config, run_dir, registry, monitor):
        service = Service(
            config=config,
            run_dir=run_dir,
            core=core,
            problems=problems,
            kafka=Kafka(config.kafka, wait=config.waits.kafka, client_id="reprise-scheduler"),
            monitor=monitor,
            stop=stop,
        )
        ok = await service.run()
        log.info("the run is over")
        return ok


def load_problems(config: Config) -> dict[str | None, Problems]:
    """The training problems under None, each evaluation set under its name. Raises DataError."""
    fields, size = config.data.fields, config.kafka.max_message_bytes
    problems: dict[str | None, Problems] = {
        None: Problems.load(config.data.train, fields, max_bytes=size)
    }
    for held_out in config.eval:
        problems[held_out.name] = Problems.load(
            held_out.data, fields, limit=held_out.limit, max_bytes=size
        )
    return problems


def eval_sets(config: Config, problems: dict[str | None, Problems]) -> list[EvalSet]:
    """The evaluation sets as the core knows them."""
    return [
        EvalSet(
            name=held_out.name,
            sources=problems[held_out.name].sources,
            every=held_out.every,
            n=held_out.n,
            greedy=held_out.greedy,
            temperature=held_out.temperature,
            max_tokens=held_out.max_tokens or config.rollout.max_tokens,
        )
        for held_out in config.eval
    ]


def _require_run(run_dir: RunDir, config: Config) -> None:
    try:
        _ = run_dir.identity
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ConfigError(
            f"{run_dir.root / 'run.json'}: cannot be read ({error}); name a run directory that "
            "`reprise run` made"
        ) from None
    if config.kafka.embedded:
        raise ConfigError(
            f"{run_dir.config}: kafka.bootstrap_servers: is `embedded`; the launcher writes the "
            "broker's address here"
        )


@contextlib.contextmanager
def _watched(config: Config) -> Iterator[None]:
    watch = MainWatch(config.waits.main)
    task = asyncio.create_task(watch.watch_loop())
    try:
        yield
    finally:
        watch.stop()
        task.cancel()


@contextlib.contextmanager
def _served(
    config: Config, run_dir: RunDir, registry: CollectorRegistry, monitor: Monitor
) -> Iterator[None]:
    server = MonitorServer(registry, monitor.health, config.metrics.host, config.metrics.port)
    try:
        run_dir.register_process("scheduler", server.port)
        yield
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
