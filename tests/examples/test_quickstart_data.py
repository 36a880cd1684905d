"""What the quickstart's model and problems are."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.exact import ExactResult, Problem, exact_accuracy, read_problems, strata

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
MODEL = QUICKSTART / "model"
GROUP_SIZE = 16


def pair(problem: Problem) -> tuple[int, int]:
    """The two numbers, smaller first: a+b and b+a are one sum."""
    a, b = sorted(int(number) for number in problem.prompt.rstrip("=").split("+"))
    return a, b


@pytest.fixture(scope="module")
def train() -> list[Problem]:
    return read_problems(QUICKSTART / "train.jsonl")


@pytest.fixture(scope="module")
def held_out() -> list[Problem]:
    return read_problems(QUICKSTART / "held_out.jsonl")


@pytest.fixture(scope="module")
def before(held_out: list[Problem]) -> ExactResult:
    return exact_accuracy(MODEL, held_out)


def test_no_sum_occurs_twice_and_none_is_in_both_files(
    train: list[Problem], held_out: list[Problem]
) -> None:
    pairs = Counter(pair(problem) for problem in [*train, *held_out])
    assert max(pairs.values()) == 1
    assert len({problem.id for problem in [*train, *held_out]}) == len(train) + len(held_out)


def test_answers_are_right_and_data_sources_say_the_digits(
    train: list[Problem], held_out: list[Problem]
) -> None:
    for problem in [*train, *held_out]:
        a, b = pair(problem)
        assert problem.answer == str(a + b)
        assert problem.data_source == f"add-{len(str(a))}+{len(str(b))}"


def test_the_mix_of_classes_is_the_same_in_both_files(
    train: list[Problem], held_out: list[Problem]
) -> None:
    shares = [
        {name: n / len(problems) for name, n in Counter(p.data_source for p in problems).items()}
        for problems in (train, held_out)
    ]
    assert shares[0] == pytest.approx(shares[1], abs=0.01)


def test_the_script_beside_them_writes_these_problems(tmp_path: Path) -> None:
    runpy.run_path(str(QUICKSTART / "make_model.py"))["write_problems"](tmp_path)
    for name in ("train.jsonl", "held_out.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes()


def test_a_quarter_is_nearly_always_solved_a_quarter_never_and_half_between(
    before: ExactResult,
) -> None:
    counts = Counter(strata(before.per_problem))
    total = sum(counts.values())
    assert counts["always"] / total == pytest.approx(0.25, abs=0.04)
    assert counts["never"] / total == pytest.approx(0.25, abs=0.04)
    assert (counts["often"] + counts["seldom"]) / total == pytest.approx(0.5, abs=0.05)


def test_the_model_knows_the_sums_that_it_does_not_dependably_say(before: ExactResult) -> None:
    never_taught = 0.25
    assert before.greedy > 0.85 * (1 - never_taught)
    assert before.mean < before.greedy - 0.25
    assert before.by_data_source["add-5+5"] < 0.01


def test_about_a_third_of_the_groups_are_zero_variance_at_the_start(train: list[Problem]) -> None:
    accuracies = exact_accuracy(MODEL, train).per_problem
    zero_variance = sum(p**GROUP_SIZE + (1 - p) ** GROUP_SIZE for p in accuracies)
    assert zero_variance / len(train) == pytest.approx(0.31, abs=0.05)


def test_the_model_loads_plainly_and_changes_no_sampling_setting() -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert sum(p.numel() for p in model.parameters()) < 3_000_000
    settings = model.generation_config.to_diff_dict()
    assert set(settings) <= {
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "transformers_version",
        "_from_model_config",
    }


def test_the_tokenizer_is_one_id_a_character_and_adds_nothing() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    ids = tokenizer("12+345=")["input_ids"]
    assert len(ids) == len("12+345=")
    assert tokenizer.decode(ids) == "12+345="
    assert tokenizer.chat_template is None
    assert None not in (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert len({tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}) == 3
