"""What a run will send through Kafka, and whether that can work.

Token ids and log-probs are 4 bytes each, so a completion token costs 8. The embedded broker keeps
every record in memory until the run ends.
"""

from __future__ import annotations

from pathlib import Path

from protocol.config import Config

TOKEN_BYTES = 8
# Rewards, spans, components and field names of one completion, generously.
COMPLETION_OVERHEAD = 512
MiB, GiB = 2**20, 2**30


def run_bytes(config: Config) -> int:
    """Upper bound of what all groups of the run hold:
    prompts × group × max_tokens × 8 × steps × (1 + refill ÷ prompts)."""
    groups = (config.run.prompts_per_step + config.max_refill) * config.run.steps
    return groups * config.rollout.group_size * config.rollout.max_tokens * TOKEN_BYTES


def group_bytes(config: Config) -> int:
    """Upper bound of the size of one group's record."""
    rollout = config.rollout
    completion = rollout.max_tokens * TOKEN_BYTES + COMPLETION_OVERHEAD
    return rollout.group_size * completion + rollout.max_prompt_tokens * 4


def check(config: Config, mistakes: list[str], facts: list[str]) -> None:
    """Add what is wrong, or what is worth knowing, to the lists."""
    total, group = run_bytes(config), group_bytes(config)
    facts.append(f"groups: at most {size(total)} in all, {size(group)} each")
    if group > config.kafka.max_message_bytes:
        mistakes.append(
            f"kafka.max_message_bytes: {config.kafka.max_message_bytes:,}, but one group may take "
            f"{group:,} bytes (rollout.group_size {config.rollout.group_size} × (rollout."
            f"max_tokens {config.rollout.max_tokens} × {TOKEN_BYTES} + {COMPLETION_OVERHEAD}) and "
            "the prompt); raise it, on the broker too, or lower rollout.max_tokens or "
            "rollout.group_size"
        )
    if config.kafka.embedded and (free := free_memory()) is not None and total > free / 2:
        mistakes.append(
            f"kafka.bootstrap_servers: the embedded broker keeps every group in memory, and the "
            f"run may send {size(total)}, more than half of the {size(free)} that are free; use "
            "another broker, or lower run.steps, run.prompts_per_step, run.max_refill, "
            "rollout.group_size or rollout.max_tokens"
        )


def size(count: int) -> str:
    """A number of bytes for people."""
    if count < MiB:
        return f"{count / 1024:.0f} KiB"
    return f"{count / MiB:.0f} MiB" if count < GiB else f"{count / GiB:.1f} GiB"


def free_memory() -> int | None:
    """Bytes that this process may still take: the machine's, or its control group's if less."""
    bounds = [_available(), _cgroup()]
    known = [bound for bound in bounds if bound is not None]
    return min(known) if known else None


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _cgroup() -> int | None:
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        return max(0, limit - int((folder / "memory.current").read_text()))
    except (OSError, ValueError):  # none, or `max`
        return None
