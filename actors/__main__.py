"""`python -m actors --run-dir DIR --name NAME`: one actor of a run.

`--engine module:Class` puts another `actors.engine.Engine` in vLLM's place, for fault benches.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import sys
from pathlib import Path

from actors.engine import Engine
from actors.service import Actor
from protocol.config import Config, ConfigError, load_config
from protocol.rundir import RunDir

log = logging.getLogger("actors")


def main() -> int:
    """Run the actor; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m actors", description=__doc__.splitlines()[0])
    parser.add_argument("--run-dir", type=Path, required=True, help="directory of the run")
    parser.add_argument("--name", required=True, help="name of this process, such as actor-0")
    parser.add_argument("--engine", default="actors.vllm_engine:VllmEngine", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    run = RunDir(arguments.run_dir.absolute())
    try:
        config = load_config(run.config)
        engine = make_engine(arguments.engine, config, arguments.name)
    except ConfigError as error:
        log.error("%s", error)
        return 2
    return asyncio.new_event_loop().run_until_complete(
        Actor(config, run, arguments.name, engine).run()
    )


def make_engine(name: str, config: Config, actor: str) -> Engine:
    """The engine class that `module:Class` names. Raises ConfigError."""
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--engine {name}: {error}") from None
    engine: Engine = kind(config, actor)
    return engine


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # An engine that was still starting keeps a thread busy that nothing can end.
    os._exit(code)
