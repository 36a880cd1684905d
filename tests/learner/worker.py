"""One rank of a trainer under test: runs the cases of a file and writes what came of them.

`torchrun -m tests.learner.worker DIR SIZE` reads DIR/cases.pickle, a list of (name, config, steps),
a step being (version, groups, whether the gradient of the last rank is made NaN), and leaves
DIR/<name>/ with the saved model and DIR/<name>.pickle with the step results.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch

from learner.batch import assemble
from learner.engine import DeepSpeedTrainer
from learner.ranks import Ranks


def rank_is_last(ranks: Ranks) -> bool:
    return ranks.rank == ranks.size - 1


@contextmanager
def poison(trainer: DeepSpeedTrainer) -> Iterator[None]:
    """While it lasts the loss is as it is and the gradient behind the last layer is NaN."""

    def spoil(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        hidden = inputs[0].clone()
        hidden.register_hook(lambda gradient: gradient * float("nan"))
        return (hidden,)

    hook = trainer._engine.module.lm_head.register_forward_pre_hook(spoil)
    yield
    hook.remove()


def main(directory: Path, size: int) -> None:
    torch.set_num_threads(1)
    ranks = Ranks.connect(size, timeout=60.0)
    cases = pickle.loads((directory / "cases.pickle").read_bytes())
    for name, config, batches in cases:
        trainer = DeepSpeedTrainer(config, ranks)
        results = []
        for version, groups, poisoned in batches:
            with poison(trainer) if poisoned and rank_is_last(ranks) else nullcontext():
                results.append(trainer.step(assemble(groups, version, config)))
        target = directory / name
        trainer.save(target)
        if ranks.leads:
            (directory / f"{name}.pickle").write_bytes(pickle.dumps(results))
    ranks.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
