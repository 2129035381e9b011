# covers: lib/curate/steps/quality.py
"""A curation with --quality prints, drops and counts rows."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.curate.curations import (
    curate,
    curate_in_units,
    read_dropped,
    read_rows,
    write_chats,
    write_texts,
)
from tests.training import read_dataset_files

FAMILIES = ("--quality", "gopher,gopher-repetition", "--quality", "c4,fineweb")
NAMES = ["the", "and", "have", "that", "cat", "dog", "Bäume", "road", "river", "日本"]


def write_text(draw: random.Random) -> str:
    """Return a text that the rules keep, or one that a rule drops."""
    words = [
        f"{draw.choice(NAMES)} n{draw.choice('xyz')}a{draw.randrange(9000)}" for _ in range(90)
    ]
    lines = [" ".join(words[i : i + 10]) + "." for i in range(0, len(words), 10)]
    kind = draw.random()
    if kind < 0.2:
        return lines[0]
    if kind < 0.4:
        return "\n".join(lines + lines[:5])
    if kind < 0.5:
        return "\n".join([*lines, "int main() { return 0; }"])
    if kind < 0.6:
        return " ".join(lines).replace(" ", "\n")
    return "\n".join(lines)


def write_sources(directory: Path, count: int) -> None:
    """Write texts of two sources, the last one with a single brace."""
    draw = random.Random(0)
    texts = [*(write_text(draw) for _ in range(count - 1)), "{"]
    names = [f"{'web' if (number + 1) % 4 else 'code'}/{number}.txt" for number in range(count)]
    write_texts(directory, texts, source=[*names[:-1], "web/brace.txt"])


def test_rules_print_their_thresholds_and_name_each_dropped_row(tmp_path: Path) -> None:
    write_sources(tmp_path / "in", 50)
    options = ("in", "--save-dir", "out", *FAMILIES, "--quality-except", "code")
    setting = "c4.min_line_words=4"
    done = curate(tmp_path, *options, "--quality-set", f"gopher.min_words=40,{setting}")
    assert "min_words 40, max_words 100000" in done.stdout and "not judged" in done.stdout
    assert "end_marks 0" in done.stdout
    dropped = read_dropped(tmp_path / "out")
    assert {line["source"].partition("/")[0] for line in dropped} == {"web"}
    assert len(dropped) + len(read_rows(tmp_path / "out")) == 50
    assert len(Counter(line["rule"] for line in dropped)) > 2
    (brace,) = [line for line in dropped if line["source"] == "web/brace.txt"]
    assert (brace["rule"], brace["value"]) == ("gopher.min_words", 0)
    again = curate(tmp_path, *options, "--quality-set", f"gopher.min_words=50,{setting}", expect=2)
    assert "gopher.min-words: 40" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quality", "gopher,c5"], "there is no family of quality rules 'c5'; the nearest is c4"),
        (["--quality-set", "c4.brace=1"], "the nearest is c4.max_braces"),
        (["--quality-set", "c4.max_braces=1"], "--quality-set needs --quality"),
        (["--quality", "c4", "--quality-except", "wep"], "the nearest is web"),
        (["--quality", "c4", "--quality-words", "none.yaml"], "no such file: none.yaml"),
    ],
)
def test_bad_usage_is_reported(tmp_path: Path, arguments: list[str], words: str) -> None:
    write_sources(tmp_path / "in", 4)
    done = curate(tmp_path, "in", *arguments, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf_datasets").exists()


def write_pairs(directory: Path, count: int) -> None:
    """Write conversations; the answers are texts that rules keep or drop."""
    draw = random.Random(0)
    chats = [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": write_text(draw)}]
        for _ in range(count)
    ]
    write_chats(directory, chats)


def test_conversations_are_judged_by_their_turns(tmp_path: Path) -> None:
    long = " ".join(f"the and w{number}." for number in range(60))
    chats = [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
        for answer in ("No.", long)
    ]
    write_chats(tmp_path / "in", chats)
    options = ("--quality", "gopher", "--quality-set", "gopher.min_word_length=2")
    curate(tmp_path, "in", "--save-dir", "out", *options)
    (line,) = read_dropped(tmp_path / "out")
    assert (line["row"], line["rule"], line["value"]) == (0, "gopher.min_words", 2)


@pytest.mark.slow
@pytest.mark.parametrize("write", [write_sources, write_pairs])
def test_any_workers_give_the_same_bytes_and_twice_changes_nothing(tmp_path, write) -> None:
    write(tmp_path / "in", 80)
    options = (*FAMILIES, "--quality-set", "gopher.min_words=51")
    curate_in_units(tmp_path, "in", *options, "--save-dir", "one", "--num-workers", 1)
    one = read_dataset_files(tmp_path / "one")
    assert len({line["rule"] for line in read_dropped(tmp_path / "one")}) > 2
    curate_in_units(tmp_path, "in", *options, "--save-dir", "three", "--num-workers", 3)
    assert read_dataset_files(tmp_path / "three") == one
    curate(tmp_path, "one", *options, "--save-dir", "again")
    assert read_dropped(tmp_path / "again") == []
    assert read_rows(tmp_path / "again").equals(read_rows(tmp_path / "one"))
