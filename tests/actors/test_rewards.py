"""Rewards: each kind's value, and what a grader that fails costs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from actors.rewards import Grade, Pool, ToGrade, validate_rewards
from actors.rewards.builtin import last_number
from protocol.config import Config, ConfigError

GRADERS = "tests.actors.graders"


def config(*rewards: dict[str, Any], answer: str = "answer", **grading: Any) -> Config:
    return Config(
        model={"path": "m"},
        data={"train": "t", "fields": {"answer": answer}},
        grading={"rewards": list(rewards), "workers": 1, **grading},
    )


async def grade(
    configured: Config,
    completions: list[str | tuple[str, str]],
    *,
    answer: Any = "right",
    prompt: Any = "?",
    extra: dict[str, Any] | None = None,
    data_source: str = "",
) -> list[Grade]:
    pairs = [(c, "stop") if isinstance(c, str) else c for c in completions]
    async with Pool(configured) as pool:
        return await pool.grade(ToGrade(data_source, prompt, answer, extra or {}, pairs))


def rewards(grades: list[Grade]) -> list[float | None]:
    return [g.reward for g in grades]


async def test_exact_is_the_answer_alone_and_ended_by_itself() -> None:
    found = await grade(
        config({"name": "exact"}),
        ["15", " 15\n", "015", "15 ", "x15", "", ("15", "length")],
        answer=15,
    )
    assert rewards(found) == [1, 1, 0, 1, 0, 0, 0]
    assert [g.correct for g in found] == rewards(found)


async def test_numeric_compares_the_last_number_within_the_tolerance() -> None:
    found = await grade(
        config({"name": "numeric", "options": {"tolerance": 0.01}}),
        ["I think 1,234.5", "first 1234.5, then 7", "1230", "no number", "1e3 or 1.2345e3"],
        answer="so it is #### 1234.5",
    )
    # 1230 differs by 4.5, less than 0.01 × 1234.5.
    assert rewards(found) == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("-3", -3.0),
        ("10-3", 3.0),
        ("x = .5.", 0.5),
        ("12,34", 34.0),
        ("1,000,000", 1e6),
        ("1e999", None),
        ("", None),
    ],
)
def test_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


async def test_an_answer_without_a_number_is_a_failure_and_no_zero() -> None:
    (found,) = await grade(config({"name": "numeric"}), ["7"], answer="seven")
    assert found.reward is None
    assert "holds no number" in found.why


async def test_math_knows_equal_expressions() -> None:
    found = await grade(
        config({"name": "math"}),
        [r"The answer is $\frac{2}{4}$.", r"\boxed{0.5}", "0.51", "so it is 1/2", "no idea", ""],
        answer=r"\frac{1}{2}",
    )
    assert rewards(found) == [1, 1, 0, 1, 0, 0]


async def test_a_custom_function_of_verl() -> None:
    reward = {"name": f"{GRADERS}:compute_score"}
    assert rewards(await grade(config(reward), ["right", "wrong"])) == [1, 0]
    assert rewards(await grade(config(reward), ["abc"], data_source="long")) == [3]


async def test_a_dict_gives_reward_correct_and_components() -> None:
    found = await grade(
        config({"name": f"{GRADERS}:scored"}), ["right", "wrong"], extra={"score": 0.25}
    )
    assert found == [Grade(0.25, 1.0, {"format": 0.5}), Grade(0.25, 0.0, {"format": 0.5})]


async def test_a_custom_function_of_trl_gets_columns_as_lists() -> None:
    reward = {"name": f"{GRADERS}:reward_func"}
    found = await grade(config(reward), ["a", "none"], extra={"level": 3, "other": "x"})
    assert rewards(found) == [3, None]
    chat = [{"role": "user", "content": "?"}]
    assert rewards(await grade(config(reward), ["a"], prompt=chat, extra={"level": 2})) == [2]


async def test_an_async_function_of_trl_gets_the_answer_under_its_columns_name() -> None:
    found = await grade(
        config({"name": f"{GRADERS}:matches"}, answer="solution"), ["right", "wrong"]
    )
    assert rewards(found) == [1, 0]


async def test_several_are_added_with_their_weights_and_none_is_left_out() -> None:
    both = config(
        {"name": "exact", "weight": 0.8},
        {"name": f"{GRADERS}:half", "weight": 0.4},
        correct_at=0.9,
    )
    found = await grade(both, ["right", "wrong", "none"])
    assert rewards(found) == pytest.approx([1.0, 0.2, 0.0])
    assert [g.correct for g in found] == [1, 0, 0]
    assert found[0].components == {"exact": 1.0, f"{GRADERS}:half": 0.5}
    (ungraded,) = await grade(config({"name": f"{GRADERS}:half"}), ["none"])
    assert (ungraded.reward, ungraded.correct) == (None, None)


async def test_weights_that_add_up_to_one_reach_correct_at_one() -> None:
    thirds = [{"name": "exact", "weight": w} for w in (0.7, 0.2, 0.1)]
    (found,) = await grade(config(*thirds), ["right"])
    assert (found.reward, found.correct) == (1.0, 1.0)


@pytest.mark.parametrize(
    "what", ["raise", "exit", "crash", "memory", "nan", "inf", "text", "none", "dict", "acc"]
)
async def test_a_failure_costs_its_own_completion_and_is_never_zero(what: str) -> None:
    reward = {"name": f"{GRADERS}:misbehaving"}
    found = await grade(config(reward), ["fine", what, "fine", "fine"])
    assert rewards(found) == [1, None, 1, 1]
    assert found[1].why


async def test_a_hang_costs_one_deadline_and_one_completion() -> None:
    reward = {"name": f"{GRADERS}:misbehaving", "timeout": 0.5}
    began = time.monotonic()
    found = await grade(config(reward), ["fine", "hang", "fine", "hang", "fine"])
    assert rewards(found) == [1, None, 1, None, 1]
    assert "no answer within 0.5 s" in found[1].why
    assert time.monotonic() - began < 10


async def test_failures_are_counted_by_kind() -> None:
    reward = {"name": f"{GRADERS}:misbehaving", "timeout": 0.5}
    async with Pool(config(reward)) as pool:
        await pool.grade(
            ToGrade("", "", "", {}, [(c, "stop") for c in ("hang", "crash", "nan", "none")])
        )
        assert pool.failures == {"died": 2, "error": 1, "none": 1}


async def test_a_reward_outside_the_declared_range_is_a_failure() -> None:
    reward = {"name": f"{GRADERS}:compute_score"}
    (found,) = await grade(config(reward, range=(0, 1)), ["abc"], data_source="long")
    assert found.reward is None
    assert "grading.range" in found.why


async def test_a_cancelled_group_leaves_no_answer_behind() -> None:
    reward = {"name": f"{GRADERS}:misbehaving", "options": {"hang": 0.3}}
    async with Pool(config(reward)) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.grade(ToGrade("", "", "", {}, [("hang", "stop")])), 0.1)
        found = await pool.grade(ToGrade("", "", "", {}, [("nan", "stop"), ("x", "stop")]))
    assert rewards(found) == [None, 1]


async def test_a_grader_starts_light_with_an_empty_environment_and_no_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REPRISE_SECRET", "x")
    found = await grade(
        config({"name": f"{GRADERS}:misbehaving"}), ["environment", "descriptors", "cores"]
    )
    # The three standard ones, the two pipes, and the listing's own.
    assert rewards(found) == [0, 6, 0]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("exakt", "module:function"),
        ("no.such.module:f", "no.such.module cannot be imported"),
        (f"{GRADERS}:nothing", "has no nothing"),
        (f"{GRADERS}:not_a_function", "is a int, not a function"),
        (f"{GRADERS}:neither", "neither verl's"),
    ],
)
def test_validation_names_the_reward_and_the_reason(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"grading\.rewards\[1\]\.name: ") as caught:
        validate_rewards(config({"name": "exact"}, {"name": name}))
    assert says in str(caught.value)


def test_validation_refuses_options_that_the_function_does_not_take() -> None:
    with pytest.raises(ConfigError, match="tolerancy"):
        validate_rewards(config({"name": "numeric", "options": {"tolerancy": 1}}))
    with pytest.raises(ConfigError, match="speed"):
        validate_rewards(config({"name": f"{GRADERS}:compute_score", "options": {"speed": 1}}))


def test_validation_accepts_what_can_be_used() -> None:
    names = ["exact", "numeric", "math", f"{GRADERS}:scored", f"{GRADERS}:reward_func"]
    validate_rewards(config(*({"name": name} for name in names)))


def test_no_grader_outlives_its_parent() -> None:
    """A parent that dies by SIGKILL cannot end its children; they end themselves."""
    script = (
        "import asyncio, os, signal\n"
        "from actors.rewards import Pool\n"
        "from tests.actors.test_rewards import config\n"
        "async def main():\n"
        "    pool = Pool(config({'name': 'exact'}))\n"
        "    await pool.start()\n"
        "    print(next(iter(pool._all))._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)
    deadline = time.monotonic() + 5
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("text", ["beyond", "component"])
async def test_a_number_that_the_protocol_cannot_carry_is_a_failure(text: str) -> None:
    (found,) = await grade(config({"name": f"{GRADERS}:misbehaving"}), [text])
    assert (found.reward, found.correct, found.components) == (None, None, {})
    assert "1.1e+300" in found.why


@pytest.mark.parametrize("weights", [(100.0, 1.0), (1e200, 1.0), (1e200, -1e200)])
async def test_a_weighted_sum_that_the_protocol_cannot_carry_is_a_failure(
    weights: tuple[float, float],
) -> None:
    reward = {"name": f"{GRADERS}:misbehaving"}
    two = [{**reward, "weight": w} for w in weights]
    found = await grade(config(*two), ["huge", "fine"])
    assert found[0].reward is None
    assert "beyond" in found[0].why
    assert found[1].reward == sum(weights)
