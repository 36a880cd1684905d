"""Reward functions, run in killable child processes.

`validate_rewards(config)` checks them before a run; `Pool` grades during one. Importing this
package is cheap: a grader process imports it too, and needs neither torch nor pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.rewards.pool import Grade, Pool, ToGrade, validate_rewards

__all__ = ["Grade", "Pool", "ToGrade", "validate_rewards"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(name)
    from actors.rewards import pool

    return getattr(pool, name)
