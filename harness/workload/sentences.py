"""Made-up English requests, so that synthetic prompts have the word frequencies and token runs of text."""

from __future__ import annotations

import numpy as np

_FRAMES = (
    "Explain how the {0} of a {1} changes when the {2} is {3}.",
    "Write a short {4} about a {1} who finds a {2} near the {0}.",
    "What would happen to the {0} if every {1} were {3}?",
    "List three reasons why a {3} {1} needs a better {0}.",
    "Compare the {0} with the {1}, and say which is more {3} for a {2}.",
    "My {1} has a {3} {0}; how can I repair it without a {2}?",
    "Summarise what is known about the {0} and the {3} {2} in one paragraph.",
    "A {1} and a {2} share {5} coins; after the {0} there are {5} left. How many did the {1} spend?",
    "Describe the {0} to someone who has never seen a {3} {1}.",
    "Give me a plan of {5} steps to turn a {2} into a {3} {0}.",
    "Translate the following {4} about the {1} into plain words, and keep every {2}.",
    "Which {3} {0} did the {1} mention in the {4}, and why does the {2} matter?",
)
_NOUNS = (
    "market", "river", "teacher", "motor", "garden", "letter", "city", "winter", "bridge", "program", "doctor",
    "table", "forest", "budget", "canal", "school", "signal", "valley", "kitchen", "battery", "planet", "neighbour",
    "theory", "machine", "library", "village", "painter", "recipe", "contract", "museum", "harbour", "theatre",
    "vaccine", "telescope", "mountain", "farmer", "protein", "railway", "glacier", "novel", "compiler", "lantern",
    "ledger", "satellite", "carpenter", "monsoon", "treaty", "keyboard", "greenhouse",
)  # fmt: skip
_ADJECTIVES = (
    "small", "new", "large", "fast", "cheap", "quiet", "heavy", "public", "careful", "broken", "warm", "local",
    "famous", "simple", "hollow", "modern", "distant", "fragile", "costly", "reliable", "medieval", "transparent",
    "peculiar",
)  # fmt: skip
_KINDS = ("story", "report", "poem", "letter", "review", "speech")


def sentences(num: int, rng: np.random.Generator) -> list[str]:
    """Make `num` sentences; the words' frequencies fall with their rank, about as Zipf's law has it."""
    frames = rng.integers(len(_FRAMES), size=num)
    nouns = _ranked(len(_NOUNS), (num, 3), rng)
    adjectives = _ranked(len(_ADJECTIVES), (num,), rng)
    kinds = rng.integers(len(_KINDS), size=num)
    numbers = rng.integers(3, 100, size=num)
    return [
        _FRAMES[frame].format(*(_NOUNS[noun] for noun in three), _ADJECTIVES[adjective], _KINDS[kind], number)
        for frame, three, adjective, kind, number in zip(frames, nouns, adjectives, kinds, numbers, strict=True)
    ]


def _ranked(num_words: int, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    weights = 1 / np.arange(1, num_words + 1)
    return rng.choice(num_words, size=shape, p=weights / weights.sum())
