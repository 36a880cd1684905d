"""The built-in reward functions: `exact`, `numeric` and `math`.

Invariant: 0 means that the completion was graded and is wrong. What cannot be graded (an answer
without a number, a comparison that ran out of time) raises, and the completion stays ungraded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion as a grader sees it.

    Attributes:
        prompt: text, or chat turns as {role, content}.
        text: the completion decoded, special tokens left out.
        finish: `stop` where it ended by itself, `length` where it was cut.
        answer: the problem's answer column (verl: `ground_truth`).
        extra: the problem's further columns.
    """

    data_source: str
    prompt: Any
    text: str
    finish: str
    answer: Any
    extra: dict[str, Any]


Grade = Callable[[Sample], Any]

NUMBER = re.compile(
    r"""(?:(?<![\w)])[-+])?
        (?: (?: \d{1,3}(?:,\d{3})+(?!\d) | \d+ ) (?:\.\d+)? | \.\d+ )
        (?:[eE][-+]?\d+)?""",
    re.VERBOSE,
)


def exact() -> Grade:
    """1 where the completion *is* the answer, else 0.

    Equality of the two texts after stripping surrounding whitespace, and the completion must have
    ended by itself: one that was cut at max_tokens has not said that it is finished. So the
    expected reward is the probability of the answer's tokens and the end token.
    """

    def grade(sample: Sample) -> float:
        equal = sample.text.strip() == str(sample.answer).strip()
        return float(equal and sample.finish == "stop")

    return grade


def numeric(*, tolerance: float = 1e-6) -> Grade:
    """1 where the last number in the completion equals the answer, else 0.

    Args:
        tolerance: largest |difference| ÷ max(1, |answer|).

    Numbers may have a sign, thousands commas, a fraction and an exponent. The answer is a number,
    or text whose last number counts (GSM8K's `… #### 42`).
    """

    def grade(sample: Sample) -> float:
        wanted = last_number(str(sample.answer))
        if wanted is None:
            raise ValueError(f"the answer {sample.answer!r:.80} holds no number")
        found = last_number(sample.text)
        if found is None:
            return 0.0
        return float(abs(found - wanted) <= tolerance * max(1.0, abs(wanted)))

    return grade


def last_number(text: str) -> float | None:
    """The last finite number in `text`."""
    for match in reversed(NUMBER.findall(text)):
        if math.isfinite(value := float(match.replace(",", ""))):
            return value
    return None


def math_verify(**options: Any) -> Grade:
    """1 where math-verify finds the completion's answer equal to the problem's, else 0.

    `options` go to `math_verify.verify`. Its time limits work by SIGALRM, so this must run in a
    process's main thread; a limit that is reached is a failure, not a wrong answer.
    """
    import math_verify as library

    def grade(sample: Sample) -> float:
        answer = str(sample.answer)
        wanted = library.parse(answer, raise_on_error=True)
        if not any(not isinstance(part, str) for part in wanted):
            # LaTeX without delimiters is found only between them.
            wanted = library.parse(f"${answer}$", raise_on_error=True) or wanted
        if not wanted:
            raise ValueError(f"math-verify cannot read the answer {answer!r:.80}")
        found = library.parse(sample.text, raise_on_error=True)
        return float(library.verify(wanted, found, raise_on_error=True, **options))

    return grade


BUILTIN: dict[str, Callable[..., Grade]] = {
    "exact": exact,
    "numeric": numeric,
    "math": math_verify,
}
