"""Short word problems with one number as the answer, made by rule: no data set to download.

    python examples/word_problems.py

Writes `smollm2/train.jsonl` and `held_out.jsonl` (chat prompts) and `gsm8k/sample.jsonl` (plain
questions, in the shape of GSM8K). The same seed gives the same files.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo", "Ines", "Jan")
THINGS = ("apples", "books", "coins", "eggs", "flowers", "marbles", "pencils", "shells", "stamps")

Made = tuple[str, int, str]
"""Question, answer, kind."""


def gain(draw: random.Random) -> Made:
    """One addition."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(2, 40), draw.randint(2, 40)
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} now?", a + b, "gain"


def loss(draw: random.Random) -> Made:
    """One subtraction."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a = draw.randint(10, 60)
    b = draw.randint(2, a - 1)
    return f"{name} has {a} {thing} and gives away {b}. How many are left?", a - b, "loss"


def boxes(draw: random.Random) -> Made:
    """One multiplication."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(2, 9), draw.randint(2, 12)
    return (
        f"{name} fills {a} boxes with {b} {thing} each. How many {thing} are that?",
        a * b,
        "boxes",
    )


def two_steps(draw: random.Random) -> Made:
    """A multiplication, then an addition."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b, c = draw.randint(2, 6), draw.randint(2, 9), draw.randint(2, 20)
    return (
        f"{name} buys {a} bags of {b} {thing} and finds {c} more. How many {thing} in all?",
        a * b + c,
        "two_steps",
    )


KINDS: tuple[Callable[[random.Random], Made], ...] = (gain, loss, boxes, two_steps)


def problems(seed: int) -> Iterator[Made]:
    """Endless distinct problems, the kinds in turn."""
    draw, seen = random.Random(seed), set[str]()
    while True:
        for kind in KINDS:
            made = kind(draw)
            if made[0] not in seen:
                seen.add(made[0])
                yield made


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def chat(number: int, made: Made) -> dict[str, object]:
    """A row whose prompt is one chat turn that asks for a boxed answer."""
    question, answer, kind = made
    text = f"{question} Think briefly, then give the number as \\boxed{{number}}."
    return {
        "id": f"word-{number}",
        "prompt": [{"role": "user", "content": text}],
        "answer": str(answer),
        "data_source": kind,
    }


def plain(number: int, made: Made) -> dict[str, object]:
    """A row with GSM8K's column names, its answer reduced to the number."""
    question, answer, kind = made
    return {"id": number, "question": question, "answer": str(answer), "data_source": kind}


def main() -> None:
    """Write the three files."""
    source = problems(seed=1)
    chats = [chat(i, next(source)) for i in range(240)]
    write(HERE / "smollm2" / "train.jsonl", chats[:200])
    write(HERE / "smollm2" / "held_out.jsonl", chats[200:])
    write(HERE / "gsm8k" / "sample.jsonl", [plain(i, next(source)) for i in range(128)])


if __name__ == "__main__":
    main()
