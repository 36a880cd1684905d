"""`python -m learner --run-dir DIR`: one learner, with as many rank processes as the config says.

Exit codes: 0 the run ended as it should, 2 bad input or config, 1 any other error, 70 hung.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from learner.inbox import LearnerError
from learner.launch import end_with_launcher, launch
from protocol.config import ConfigError, load_config
from protocol.kafka import BrokerError

TRAINER = "REPRISE_TRAINER"
DEFAULT_TRAINER = "learner.engine:DeepSpeedTrainer"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m learner", description="Train a run's batches.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run's directory")
    parser.add_argument(
        "--trainer",
        default=os.environ.get(TRAINER, DEFAULT_TRAINER),
        help=f"module:Class that trains (default: {DEFAULT_TRAINER}, or ${TRAINER})",
    )
    options = parser.parse_args(given)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        return _start(options, given)
    except (ConfigError, FileNotFoundError, NotADirectoryError, PermissionError) as error:
        return _report(error, 2)
    except Exception as error:
        if not isinstance(error, BrokerError | LearnerError | OSError):
            logging.getLogger("learner").exception("unexpected error")
        return _report(error, 1)


def _start(options: argparse.Namespace, given: Sequence[str]) -> int:
    directory: Path = options.run_dir
    if not (directory / "run.json").is_file():
        raise ConfigError(f"--run-dir {directory}: no run.json there; expected a run directory")
    ranks = load_config(directory / "config.yaml").learner.ranks
    if ranks > 1 and "RANK" not in os.environ:
        return launch(given, ranks)
    end_with_launcher()
    _quiet()
    # Only now, for torch and deepspeed take seconds to import.
    from learner.service import run
    from learner.trainer import find_trainer

    run(directory, find_trainer(options.trainer))
    return 0


def _quiet() -> None:
    """Libraries that print progress bars and notices say only what is wrong."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    for name in ("DeepSpeed", "transformers", "torch.distributed", "aiokafka"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _report(error: BaseException, code: int) -> int:
    text = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {text}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    # Library threads may linger after a failure; the exit code must not wait for them.
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
