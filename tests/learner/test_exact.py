"""The exact accuracy is a probability: enumeration, a loop and sampling agree with it."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from learner.exact import (
    ExactResult,
    Problem,
    encode_answer,
    encode_prompt,
    exact_accuracy,
    main,
    read_problems,
    score,
    strata,
)

VOCABULARY = ["<pad>", "<eos>", "a", "b"]
EOS = 1
PROBLEMS = [
    Problem("a", "b", "short", "1"),
    Problem("abba", "ab", "long", "2"),
    Problem("bb", "", "short", "3"),
    Problem("ab", "baab", "long", "4"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Random weights, wide enough that the distributions are far from uniform."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(VOCABULARY),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            initializer_range=0.5,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=EOS,
        )
    ).eval()


@torch.no_grad()
def next_token_distribution(
    model: LlamaForCausalLM, ids: list[int], temperature: float
) -> torch.Tensor:
    """[V]: an unpadded, unbatched pass, as a sampler would make it."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, -1].double()
    return (logits / temperature).softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("batch_size", [1, 3, 256])
def test_is_the_product_of_the_sampler_s_token_probabilities(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    temperature: float,
    batch_size: int,
) -> None:
    result = score(model, tokenizer, PROBLEMS, temperature=temperature, batch_size=batch_size)

    entropies = []
    for i, problem in enumerate(PROBLEMS):
        context, product, greedy = encode_prompt(tokenizer, problem.prompt), 1.0, True
        for token in encode_answer(tokenizer, problem.answer):
            distribution = next_token_distribution(model, context, temperature)
            product *= distribution[token].item()
            greedy &= int(distribution.argmax()) == token
            entropies.append(-sum(p * math.log(p) for p in distribution.tolist()))
            context = [*context, token]
        assert result.per_problem[i] == pytest.approx(product, rel=1e-4)
    assert result.mean == pytest.approx(sum(result.per_problem) / len(PROBLEMS))
    assert result.entropy == pytest.approx(sum(entropies) / len(entropies), rel=1e-4)
    assert result.by_data_source == {
        "short": pytest.approx((result.per_problem[0] + result.per_problem[2]) / 2),
        "long": pytest.approx((result.per_problem[1] + result.per_problem[3]) / 2),
    }


def test_all_completions_of_a_length_or_less_and_the_unfinished_ones_share_probability_one(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    letters = [token for token in VOCABULARY if token != "<eos>"]
    finished = [
        Problem("ab", "".join(word), "all", str(word))
        for length in range(3)
        for word in itertools.product(letters, repeat=length)
    ]
    unfinished = 0.0
    for word in itertools.product([0, 2, 3], repeat=3):
        context, product = encode_prompt(tokenizer, "ab"), 1.0
        for token in word:
            product *= next_token_distribution(model, context, 1.0)[token].item()
            context = [*context, token]
        unfinished += product

    assert sum(score(model, tokenizer, finished).per_problem) == pytest.approx(1 - unfinished)


def test_is_the_frequency_of_the_answer_among_samples(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    count = 4000
    problem = PROBLEMS[0]
    expected = score(model, tokenizer, [problem]).mean
    torch.manual_seed(1)
    prompt = torch.tensor([encode_prompt(tokenizer, problem.prompt)])

    sampled = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=2,
        num_return_sequences=count,
    )

    answer = torch.tensor(encode_answer(tokenizer, problem.answer))
    completions = sampled[:, prompt.shape[1] :]
    frequency = (completions == answer).all(-1).float().mean().item()
    assert 0.01 < expected < 0.99
    assert abs(frequency - expected) < 4 * math.sqrt(expected * (1 - expected) / count)


def test_greedy_is_what_generate_says_without_sampling(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    problems = []
    for prompt in ("a", "b", "ab", "ba", "abb"):
        ids = torch.tensor([encode_prompt(tokenizer, prompt)])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8
        )
        completion = out[0, ids.shape[1] :].tolist()
        if completion[-1] == EOS:
            problems.append(Problem(prompt, tokenizer.decode(completion[:-1]), "greedy", prompt))
    wrong = Problem("a", problems[0].answer + "ab", "wrong", "wrong")

    assert problems
    assert score(model, tokenizer, problems).greedy == 1.0
    assert score(model, tokenizer, [*problems, wrong]).greedy < 1.0


def test_strata_follow_the_accuracy_before() -> None:
    assert strata([1.0, 0.8, 0.79, 0.5, 0.49, 0.01, 0.009, 0.0]) == [
        "always",
        "always",
        "often",
        "often",
        "seldom",
        "seldom",
        "never",
        "never",
    ]


def test_a_chat_template_wraps_the_prompt_as_one_user_turn(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    with_template = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>", eos_token="<eos>"
    )
    with_template.chat_template = (
        "{% for m in messages %}a{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}b{% endif %}"
    )
    assert encode_prompt(with_template, "bb") == encode_prompt(tokenizer, "abbb")


def test_no_problems_and_no_temperature_are_refused(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(ValueError, match="no problems"):
        score(model, tokenizer, [])
    with pytest.raises(ValueError, match="temperature must be above 0, found 0"):
        score(model, tokenizer, PROBLEMS, temperature=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no problems in it"),
        ("{\n", "line 1: not JSON"),
        ("[1]\n", "line 1: expected a JSON object, found list"),
        ('{"id": "1", "prompt": "a", "answer": 3}\n', "line 1: field 'answer' must be a string"),
    ],
)
def test_a_bad_data_file_names_the_line_and_field(tmp_path: Path, text: str, message: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        read_problems(data)


def test_command_line(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    directory, data = tmp_path / "model", tmp_path / "data.jsonl"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    data.write_text("".join(json.dumps(p._asdict()) + "\n" for p in PROBLEMS), encoding="utf-8")

    assert main(["--model", str(directory), "--data", str(data), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    result: ExactResult = exact_accuracy(directory, PROBLEMS)
    assert printed["mean"] == pytest.approx(result.mean)
    assert printed["per_problem"] == pytest.approx(list(result.per_problem))
    assert printed["strata"] == strata(result.per_problem)
    assert set(printed) >= {"by_data_source", "by_stratum", "greedy", "entropy"}

    assert main(["--model", str(tmp_path / "absent"), "--data", str(data)]) == 2
    assert "no config.json there" in capsys.readouterr().err
    assert main(["--model", str(directory), "--data", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
