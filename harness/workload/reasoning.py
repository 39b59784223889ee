"""Make pattern-matching problems by rule, in the manner of HELM's synthetic reasoning task.

A *rule* is a row of letters and operators. Putting one or two words in place of each letter gives a *result*. A
problem shows four rules over the same symbols and one result, and asks which rule the result came from; a prompt is
an instruction, five solved problems, and one to solve. HELM's generator may show several rules that fit; here exactly
one does (`fits`). Words and wording are this project's own. In Mixtral's tokens, begin token included, prompts have
mean 246 and maximum 253, where MoE-Lightning (Table 3) measured 242 and 256 for HELM's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from harness.workload.streams import Stream, generator

LETTERS = ("X", "Y", "Z")
OPERATORS = ("+", "-", "*", "=")
ANIMALS = ("bear", "wolf", "lion", "horse", "sheep", "duck", "deer", "bird")
PLANTS = ("rose", "oak", "pine", "corn", "rice", "bean", "mint", "lemon")
WORDS = ANIMALS + PLANTS
NUM_RULES = 4
NUM_SHOTS = 5
SHOTS_SEED = 295  # the solved problems never change; these bring the prompts near the published lengths
INSTRUCTION = "Four rules and one result are given. Write down the rule that produces the result."

Rule = tuple[str, ...]


class Problem(NamedTuple):
    rules: tuple[Rule, ...]
    result: str
    answer: Rule


def fits(rule: Sequence[str], result: str) -> bool:
    """Tell whether some choice of one or two words for each letter turns `rule` into `result`."""
    seen: set[str] = set()
    parts = []
    for symbol in rule:
        if symbol not in LETTERS:
            parts.append(re.escape(symbol))
        elif symbol in seen:
            parts.append(f"(?P={symbol})")
        else:
            seen.add(symbol)
            parts.append(rf"(?P<{symbol}>[a-z]+(?: [a-z]+)?)")
    return re.fullmatch(" ".join(parts), result) is not None


def problem(rng: np.random.Generator) -> Problem:
    """Make a problem of two or three letters and two or three operators, in four orders of which only the answer's fits
    the result."""
    while True:
        symbols = [
            *rng.choice(LETTERS, size=rng.integers(2, 4)).tolist(),
            *rng.choice(OPERATORS, size=rng.integers(2, 4)).tolist(),
        ]
        answer = _order(symbols, rng)
        words = {letter: " ".join(rng.choice(WORDS, size=rng.integers(1, 3)).tolist()) for letter in LETTERS}
        result = " ".join(words.get(symbol, symbol) for symbol in answer)
        rules = {answer}
        for _ in range(50):  # some symbols have too few orders that differ enough: then start over with others
            decoy = _order(symbols, rng)
            if not fits(decoy, result):
                rules.add(decoy)
            if len(rules) == NUM_RULES:
                shuffled = [sorted(rules)[index] for index in rng.permutation(NUM_RULES)]
                return Problem(tuple(shuffled), result, answer)


def _order(symbols: Sequence[str], rng: np.random.Generator) -> Rule:
    return tuple(symbols[index] for index in rng.permutation(len(symbols)))


def reasoning_prompts(seed: int) -> Iterator[str]:
    """Yield endless problems behind one instruction and the same five solved ones, as few-shot evaluation has it."""
    solved = [problem(generator(SHOTS_SEED, Stream.SHOTS, index)) for index in range(NUM_SHOTS)]
    head = "\n".join([INSTRUCTION, *(f"{_question(item)} {' '.join(item.answer)}" for item in solved)])
    for index in count():
        yield f"{head}\n{_question(problem(generator(seed, Stream.REASONING, index)))}"


def _question(item: Problem) -> str:
    rules = " | ".join(" ".join(rule) for rule in item.rules)
    return f"Rules: {rules}. Result: {item.result}\nRule:"
