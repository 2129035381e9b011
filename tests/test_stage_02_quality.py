# covers: 02_build_hf_dataset.py, lib/curate/quality/rules.py
"""Stage 02 with --quality prints, drops and counts rows, on several machines as well."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.conftest import StageRunner
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
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


def write_sources(root: Path, files: int) -> None:
    draw = random.Random(0)
    for number in range(files):
        source = root / ("code" if number % 4 == 0 else "web")
        source.mkdir(parents=True, exist_ok=True)
        texts = [write_text(draw) for _ in range(8)]
        if number % 3:
            lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
            (source / f"{number}.jsonl").write_text(lines)
        else:
            (source / f"{number}.txt").write_text(texts[0])


def read_dropped(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "dropped.jsonl").open(encoding="utf-8")]


def test_rules_print_their_thresholds_and_name_each_dropped_row(stage: StageRunner, tmp_path):
    write_sources(tmp_path / "raw", 12)
    (tmp_path / "raw/web/brace.txt").write_text("{")
    done = stage(
        *(SCRIPT, "--data-folder", "raw", "--save-dir", "out", *FAMILIES),
        *("--quality-except", "code", "--quality-set", "gopher.min_words=40,c4.min_line_words=4"),
    )
    assert "min_words 40, max_words 100000" in done.stdout and "not judged" in done.stdout
    assert "end_marks 0" in done.stdout and "gopher.min_words " in done.stdout
    dropped = read_dropped(tmp_path / "out")
    assert {line["path"].partition("/")[0] for line in dropped} == {"web"}
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["summary"]["rules"]
    assert sum(rule_counts["dropped"] for rule_counts in counts.values()) == len(dropped)
    assert len([name for name in counts if counts[name]["dropped"]]) > 2
    assert len(counts) == 30 and all(
        rule_counts["alone"] >= rule_counts["dropped"] for rule_counts in counts.values()
    )
    (brace,) = [line for line in dropped if line["path"] == "web/brace.txt"]
    assert (brace["rule"], brace["value"]) == ("gopher.min_words", 0)
    again = stage(
        *(SCRIPT, "--data-folder", "raw", "--save-dir", "out", *FAMILIES),
        *("--quality-except", "code", "--quality-set", "gopher.min_words=50,c4.min_line_words=4"),
        expect=2,
    )
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
def test_bad_usage_is_reported(stage: StageRunner, tmp_path, arguments, words):
    write_sources(tmp_path / "raw", 2)
    done = stage(SCRIPT, "--data-folder", "raw", *arguments, expect=2)
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "hf_datasets").exists()


def test_conversations_are_judged_by_their_turns(stage: StageRunner, tmp_path):
    long = " ".join(f"the and w{number}." for number in range(60))
    chats = [
        [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": answer}]
        for answer in ("No.", long)
    ]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/chats.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    stage(
        *(SCRIPT, "--data-folder", "raw", "--save-dir", "out", "--format", "chat"),
        *("--quality", "gopher", "--quality-set", "gopher.min_word_length=2"),
    )
    (line,) = read_dropped(tmp_path / "out")
    assert (line["position"], line["rule"], line["value"]) == (1, "gopher.min_words", 2)


@pytest.mark.slow
def test_several_machines_and_any_workers_give_the_same_bytes(stage: StageRunner, tmp_path):
    write_sources(tmp_path / "raw_text", 60)
    stage("01_organize_data.py", "--num-dirs", 3)
    options = (*FAMILIES, "--quality-except", "code", "--dedup", "near")
    stage(SCRIPT, *options, "--save-dir", "one", "--num-workers", 1)
    one = read_dataset_files(tmp_path / "one")
    rules = {line["rule"] for line in read_dropped(tmp_path / "one")}
    assert len(rules) > 2
    for workers in (2, 3):
        stage(SCRIPT, *options, "--save-dir", f"w{workers}", "--num-workers", workers)
        assert read_dataset_files(tmp_path / f"w{workers}") == one
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", "1-2", "--num-workers", 2)
    stage(SCRIPT, *options, "--save-dir", "many", "--only-splits", 0)
    stage(SCRIPT, *options, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == one
