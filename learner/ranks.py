"""The rank processes of one learner and what they say to each other.

Invariant: all ranks make the same calls in the same order. One rank is the same code with calls
that return at once. Every collective has the deadline `waits.collective`.
"""

from __future__ import annotations

import os
from dataclasses import astuple, fields
from datetime import timedelta

import torch
import torch.distributed as dist

from learner.loss import TokenSums


class Ranks:
    """This process's place among the ranks."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Use `connect`; it makes the process group besides."""
        self.rank = rank
        self.size = size
        self.device = device

    @classmethod
    def connect(cls, expected: int, timeout: float) -> Ranks:
        """Join the process group that the environment names (`torchrun` sets it).

        Without such an environment this process is the only rank. Raises RuntimeError if there are
        not `expected` ranks.
        """
        rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if size != expected:
            raise RuntimeError(
                f"learner.ranks is {expected} and {size} rank processes were started; start "
                "`python -m learner`, which starts the ranks itself, or torchrun with "
                f"--nproc-per-node {expected}"
            )
        on_gpu = torch.cuda.is_available()
        local = int(os.environ.setdefault("LOCAL_RANK", "0"))
        device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
        if on_gpu:
            torch.cuda.set_device(device)
        deadline = timedelta(seconds=timeout)
        backend = "nccl" if on_gpu else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=deadline)
        else:
            # No port is needed where there is nobody to talk to.
            dist.init_process_group(
                backend, store=dist.HashStore(), rank=0, world_size=1, timeout=deadline
            )
        return cls(rank, size, device)

    @property
    def leads(self) -> bool:
        """Is this rank 0, which alone talks to Kafka and writes files?"""
        return self.rank == 0

    def share(self, content: bytes | None) -> bytes:
        """Rank 0's `content` on every rank; the others pass None."""
        if self.size == 1:
            assert content is not None
            return content
        length = torch.tensor([len(content or b"")], device=self.device)
        dist.broadcast(length, 0)
        if content is None:
            data = torch.empty(int(length.item()), dtype=torch.uint8, device=self.device)
        else:
            data = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(self.device)
        dist.broadcast(data, 0)
        return data.cpu().numpy().tobytes()

    def total(self, sums: TokenSums) -> TokenSums:
        """The sums and maxima over the tokens of all ranks."""
        if self.size == 1:
            return sums
        names = [f.name for f in fields(TokenSums)]
        values = torch.tensor(astuple(sums), dtype=torch.float64, device=self.device)
        added, largest = values.clone(), values
        dist.all_reduce(added)
        # A NaN must reach every rank, and a maximum may swallow it; sums do not.
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return TokenSums(
            **{
                name: (largest if name.startswith("max_") else added)[i].item()
                for i, name in enumerate(names)
            }
        )

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()
