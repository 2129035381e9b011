"""Write the six small tasks of the suite `small`. The same version writes the same bytes.

  python -m lib.evaluate.small_tasks DIR

They test skills that a sound model learns early, and need no knowledge: a broken model answers them
by chance. The data is ours, so it may lie in the repository.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.core import options, stage

_ITEMS = 60
_WORDS = [
    "apple",
    "bread",
    "chair",
    "dance",
    "eagle",
    "flame",
    "grape",
    "house",
    "island",
    "jungle",
    "kettle",
    "lemon",
    "mouse",
    "night",
    "ocean",
    "piano",
    "queen",
    "river",
    "stone",
    "table",
    "uncle",
    "voice",
    "water",
    "yellow",
]
_NUMBERS = [
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
_SAMPLES = 3  # solved examples in each context

Example = tuple[str, list[str]]  # a question, and the choices with the right one first


def main(argv: list[str]) -> None:
    """Write the tasks into a directory."""
    parser = options.Parser(__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory to write to")
    directory = parser.parse(argv).directory
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in make_files().items():
        (directory / name).write_text(content, encoding="utf-8")


def make_files() -> dict[str, str]:
    """Return the content of each file by its name."""
    files = {}
    for name, (make, description) in _TASKS.items():
        # The seed is a sum, because Python's hash of a name changes from process to process.
        rng = random.Random(sum(name.encode()))
        lines = [json.dumps(_make_item(rng, make), ensure_ascii=False) for _ in range(_ITEMS)]
        files[f"{name}.jsonl"] = "".join(f"{line}\n" for line in lines)
        files[f"{name}.yaml"] = (
            f"description: {description}\nmetric: accuracy\nlicence: MIT (this repository)\n"
        )
    return files


def _make_item(rng: random.Random, make: Callable[[random.Random], Example]) -> dict[str, Any]:
    """Return an item: solved examples, a question, and its choices in random order."""
    solved = ""
    for _ in range(_SAMPLES):
        question, choices = make(rng)
        solved += f"{question} {choices[0]}\n"
    question, choices = make(rng)
    order = rng.sample(choices, len(choices))
    return {"context": solved + question, "choices": order, "gold": order.index(choices[0])}


def _copy_words(rng: random.Random) -> Example:
    a, b, c = rng.sample(_WORDS, 3)
    orders = ((a, b, c), (b, a, c), (a, c, b), (c, b, a))
    return f"{a} {b} {c} ->", [" ".join(order) for order in orders]


def _count_on(rng: random.Random) -> Example:
    first = rng.randrange(len(_NUMBERS) - 4)
    others = rng.sample(_NUMBERS[:first] + _NUMBERS[first + 4 :], 3)
    return ", ".join(_NUMBERS[first : first + 3]) + ",", [_NUMBERS[first + 3], *others]


def _close_brackets(rng: random.Random) -> Example:
    opened = rng.choices(list(_PAIRS), k=3)
    text = f"{opened[0]}a {opened[1]}b {opened[2]}c"
    closed = [_PAIRS[bracket] for bracket in reversed(opened)]
    right = " ".join(closed)
    others = list[str]()
    while len(others) < 3:
        other = " ".join(rng.choices(list(_PAIRS.values()), k=3))
        if other not in (right, *others):
            others.append(other)
    return text, [right, *others]


def _capitalise_word(rng: random.Random) -> Example:
    word, *others = rng.sample(_WORDS, 4)
    return f"{word} ->", [word.upper(), *(other.upper() for other in others)]


def _reverse_word(rng: random.Random) -> Example:
    word = "".join(rng.sample("abcdefgh", 3))
    backwards = word[::-1]
    orders = [word, word[1:] + word[0], word[2] + word[0] + word[1]]
    return f"{' '.join(word)} ->", [" ".join(text) for text in (backwards, *orders)]


def _find_odd(rng: random.Random) -> Example:
    usual, odd = rng.sample(_WORDS, 2)
    place = rng.randrange(4)
    words = [usual] * 4
    words[place] = odd
    return f"{' '.join(words)}: odd", [odd, usual]


_TASKS: dict[str, tuple[Callable[[random.Random], Example], str]] = {
    "brackets": (_close_brackets, "close three brackets in the right order"),
    "capitals": (_capitalise_word, "write a word in capital letters"),
    "copying": (_copy_words, "repeat three words in the same order"),
    "counting": (_count_on, "continue a row of number words"),
    "odd_one": (_find_odd, "name the word that differs from the others"),
    "reversing": (_reverse_word, "write three letters backwards"),
}


if __name__ == "__main__":
    sys.argv[0] = "lib.evaluate.small_tasks"
    stage.run_main(main)
