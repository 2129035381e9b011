# covers: 02_build_hf_dataset.py, lib/curate/classify/language.py, lib/curate/classify/scores.py
# covers: lib/curate/classify/top_scores.py, lib/curate/near/build.py, lib/curate/near/plan.py
# covers: lib/curate/near/output.py, lib/curate/near/rows.py
"""Stage 02 with --language and --quality-model: labels, scores, what is dropped, and two passes."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lib.core import hashing
from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, shards, work_units
from lib.corpus.dataset import PARTS, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.curate.classify import language
from lib.curate.near.build import Planner
from tests.conftest import StageRunner
from tests.fasttext_models import LANGUAGES, QUALITY, write_classifier
from tests.test_stage_02_near import build_dataset, read_dropped, read_table, write_lines
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
TEXTS = {
    "the house and the garden of stone": "en",
    "der garten und die blumen aus stein": "de",
    "le jardin et les fleurs de la maison": "fr",
    "the and": "und",
    "12345 " * 20: "und",
}


@pytest.fixture
def models(tmp_path: Path) -> RowOptions:
    """Return options with two models, but no rule."""
    return RowOptions(
        language_model=write_classifier(tmp_path / "languages.bin", LANGUAGES),
        quality_model=write_classifier(tmp_path / "quality.bin", QUALITY),
    )


def build_once(folder: Path, out: Path, row_options: RowOptions) -> DatasetWriter:
    """Build a dataset in one pass, in this process."""
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir(exist_ok=True)
    with DatasetWriter(out, row_options) as dataset:
        for task in work_units.cut_files(folder, files, out / PARTS, row_options):
            dataset.add(work_units.process_unit(task))
        dataset.finish()
    return dataset


def grade(number: int) -> str:
    """Return a text whose score grows with the number, modulo 7."""
    words = ["good" if place < number % 7 else "bad" for place in range(6)]
    return " ".join([*words, f"w{number}"])


def test_rows_are_labelled_and_other_languages_dropped(models, tmp_path):
    write_lines(tmp_path / "raw/a.jsonl", [*TEXTS])
    build_once(tmp_path / "raw", tmp_path / "all", replace(models, language=["all"]))
    table = read_table(tmp_path / "all")
    assert [table[name].to_pylist() for name in ("text", "language")] == [
        [*TEXTS],
        [*TEXTS.values()],
    ]

    dataset = build_once(
        tmp_path / "raw", tmp_path / "two", replace(models, language=["de", "und"])
    )
    assert read_table(tmp_path / "two")["language"].to_pylist() == ["de", "und", "und"]
    dropped = [
        (line["position"], line["rule"], line["value"]) for line in read_dropped(tmp_path / "two")
    ]
    assert dropped == [(1, "language", "en"), (3, "language", "fr")]
    assert dataset.summary()["rules"]["language"] == {"dropped": 2, "alone": 2}
    (problem,) = map(json.loads, (tmp_path / "two/errors.jsonl").read_text().splitlines())
    assert problem["message"] == "2 rows are in none of the languages de, und"


def test_conversations_are_labelled_by_all_turns(models, tmp_path):
    chats = [
        [{"role": "user", "content": "und"}, {"role": "assistant", "content": answer}]
        for answer in ("der garten und die blumen", "the garden and the house of stone")
    ]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text(
        "".join(json.dumps({"messages": chat}) + "\n" for chat in chats)
    )
    shape = replace(models, language=["all"], format="chat", language_score=0.5)
    build_once(tmp_path / "raw", tmp_path / "out", shape)
    assert read_table(tmp_path / "out")["language"].to_pylist() == ["de", "en"]


def test_rows_below_a_score_are_dropped_in_one_pass(models, tmp_path):
    write_lines(tmp_path / "raw/a.jsonl", [grade(number) for number in range(70)])
    shape = replace(models, quality_score=0.5)
    assert not shape.has_two_passes
    build_once(tmp_path / "raw", tmp_path / "out", shape)
    scores = read_table(tmp_path / "out")["quality"].to_pylist()
    dropped = read_dropped(tmp_path / "out")
    assert len(scores) == 40 and min(scores) >= 0.5
    assert {line["rule"] for line in dropped} == {"quality model"}
    assert max(line["value"] for line in dropped) < 0.5


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of several units, one of them a span of a larger file."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 4000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 4000)
    numbers = [*range(300)]
    random.Random(0).shuffle(numbers)
    texts = [grade(number) for number in numbers]
    write_lines(tmp_path / "raw/a.jsonl", texts[:200])
    write_lines(tmp_path / "raw/b.jsonl", [*texts[200:], *texts[:20], "x"])
    return tmp_path / "raw"


def test_the_share_with_the_highest_scores_is_kept(models, spread, tmp_path):
    """Rows that a rule drops do not count; of equal scores, the first rows are kept."""
    shape = replace(models, keep_top=0.25, min_chars=2, keep_source=True)
    build_dataset(spread, tmp_path / "out", shape)
    build_once(spread, tmp_path / "all", replace(models, min_chars=2))
    everything = read_table(tmp_path / "all")
    scores = np.array(everything["quality"].to_pylist())
    numbers = np.sort(np.argsort(-scores, kind="stable")[:80])
    table = read_table(tmp_path / "out")
    assert table["text"].to_pylist() == everything["text"].take(numbers).to_pylist()
    assert table.column_names == ["text", "source", "quality"]

    dropped = read_dropped(tmp_path / "out")
    lines = {path.name: path.read_text().splitlines() for path in spread.iterdir()}
    assert [line["rule"] for line in dropped].count("short") == 1
    low = [line for line in dropped if line["rule"] == "quality model"]
    assert len(low) == 320 - 80
    values = dict(zip(everything["text"].to_pylist(), scores, strict=True))
    for line in low:
        text = json.loads(lines[line["path"]][line["position"] - 1])["text"]
        assert line["value"] == pytest.approx(values[text], abs=1e-4)
        assert line["duplicate_of"] is None


def test_low_scores_go_before_copies_and_near_duplicates(models, tmp_path):
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
    write_lines(tmp_path / "raw/a.jsonl", texts)
    build_dataset(tmp_path / "raw", tmp_path / "out", replace(models, keep_top=0.5, dedup="near"))
    table = read_table(tmp_path / "out")
    assert table["text"].to_pylist() == [texts[1]]
    assert table["cluster_size"].to_pylist() == [3]
    rules = [(line["position"], line["rule"]) for line in read_dropped(tmp_path / "out")]
    assert rules == [
        (1, "quality model"),
        (3, "duplicate"),
        (4, "near duplicate"),
        (5, "quality model"),
        (6, "quality model"),
    ]


@pytest.mark.parametrize("dedup", ["none", "exact", "near"])
def test_a_build_stopped_anywhere_gives_the_same_bytes(
    models, spread, tmp_path, monkeypatch, dedup
):
    shape = replace(models, keep_top=0.3, validation_percent=20, dedup=dedup)
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", 1)
    build_dataset(spread, tmp_path / "whole", shape)
    note = Planner._note
    steps = []

    def stop(self: Planner, **facts: object) -> None:
        """Stop before a step is recorded."""
        if steps and steps[0] in facts:
            steps.clear()
            raise KeyboardInterrupt
        note(self, **facts)

    monkeypatch.setattr(Planner, "_note", stop)
    for step in ("rows", "top", *(["walk"] if dedup == "near" else [])):
        steps.append(step)
        with pytest.raises(KeyboardInterrupt):
            build_dataset(spread, tmp_path / "out", shape)
    for units in (0, 2, 3):
        build_dataset(spread, tmp_path / "out", shape, units)
    build_dataset(spread, tmp_path / "out", shape)
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


def test_options_that_cannot_work_are_refused_before_anything_is_read(stage, models, tmp_path):
    write_lines(tmp_path / "raw/a.jsonl", [*TEXTS])
    broken = tmp_path / "broken.bin"
    broken.write_bytes(models.quality_model.read_bytes()[:-1])
    done = stage(
        *(SCRIPT, "--data-folder", "raw", "--save-dir", "out", "--language", "en,zz"),
        *("--language-model", models.language_model, "--quality-model", broken),
        *("--keep-top", 0.5, "--quality-score", 0.1),
        expect=2,
    )
    for text in ("has no label zz", "--keep-top and --quality-score exclude each other"):
        assert text in done.stderr
    assert not (tmp_path / "out").exists()
    done = stage(SCRIPT, "--data-folder", "raw", "--language", "de", expect=3)
    assert "lid.176.ftz does not exist" in done.stderr
    assert "8f3472cfe8738a7b6099e8e999c3cbfae0dcd15696aac7d7738a8039db603e83" in done.stderr


def test_labels_in_other_forms_are_recognised_in_errors():
    known = {"en", "de", "und", "zh-cn"}
    for name in ("EN", "en-US", "en_GB", "__label__en"):
        assert language._find_near_labels(name, known) == ["en"]
    assert language._find_near_labels("zh-CN", known) == ["zh-cn"]
    assert language._find_near_labels("xx", known) == []


OPTIONS = ("--validation-percent", 20, "--keep-top", 0.3, "--language", "all", "--keep-source")


def against_earlier_rows_are_no_candidates(
    stage: StageRunner, tmp_path: Path, options: tuple[object, ...]
) -> None:
    """The share is one of the new rows; those that are kept are compared with earlier ones."""
    old = read_table(tmp_path / "one/train")["text"].to_pylist()
    words = " ".join(f"n{number}" for number in range(30))
    write_lines(tmp_path / "new/a.jsonl", ["bad x y", f"{words} good", old[0], "bad z", "bad x y"])
    done = stage(
        *(*options, "--data-folder", "new", "--save-dir", "later", "--near-against", "one"),
        *("--keep-top", 0.4, "--validation-percent", 0),
    )
    assert "2 of 5 rows were kept for their scores" in done.stdout
    assert read_table(tmp_path / "later")["text"].to_pylist() == [f"{words} good"]
    rules = [(line["position"], line["rule"]) for line in read_dropped(tmp_path / "later")]
    assert rules == [
        (1, "quality model"),
        (3, "duplicate"),
        (4, "quality model"),
        (5, "quality model"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_machines_and_workers_give_the_same_bytes(
    stage: StageRunner, tmp_path: Path, spread: Path, models: RowOptions, dedup: str
) -> None:
    spread.rename(tmp_path / "raw_text")
    stage("01_organize_data.py", "--num-dirs", 2)
    options = (
        *(SCRIPT, *OPTIONS, "--dedup", dedup, "--language-model", models.language_model),
        *("--quality-model", models.quality_model),
    )
    done = stage(*options, "--save-dir", "one")
    assert "rows dropped by --keep-top 0.3" in done.stdout
    one = read_dataset_files(tmp_path / "one")
    digest = hashing.file_digest(models.language_model, "sha256")
    page = one["report.html"].decode()
    assert digest in page and "Quality scores" in page
    for workers in (2, 3):
        stage(*options, "--save-dir", f"n{workers}", "--num-workers", workers)
        assert read_dataset_files(tmp_path / f"n{workers}") == one
    for numbers, share in (("0", 0.9), ("1", 0.3)):  # the share may be chosen for the merge
        stage(*options, "--keep-top", share, "--save-dir", "m", "--only-splits", numbers)
    stage(*options, "--save-dir", "m", "--merge")
    assert read_dataset_files(tmp_path / "m") == one
    assert "already done" in stage(*options, "--save-dir", "one").stdout
    if dedup == "near":
        against_earlier_rows_are_no_candidates(stage, tmp_path, options)
    # The identity contains the content of a model, not its path.
    write_classifier(models.quality_model, {"hq": ["bad"], "cc": ["good"]})
    done = stage(*options, "--save-dir", "one", expect=2)
    assert "--quality-model: " in done.stderr


@pytest.mark.long
def test_the_printed_commands_fetch_the_known_model(stage: StageRunner, tmp_path: Path) -> None:
    """Needs an index of packages."""
    texts = {
        "The committee has agreed to publish the report before the end of the year.": "en",
        "DER AUSSCHUSS HAT BESCHLOSSEN, DEN BERICHT NOCH IN DIESEM JAHR ZU VERÖFFENTLICHEN.": "de",
        "Le comité a décidé de publier le rapport avant la fin de cette année.": "fr",
        "委员会已经同意在今年年底之前发表这份报告，并且会向所有成员国提供一份副本。": "zh",
    }
    write_lines(tmp_path / "raw/a.jsonl", [*texts])
    command = (SCRIPT, "--data-folder", "raw", "--save-dir", "out", "--language", "all")
    error = stage(*command, expect=3).stderr
    lines = [line.strip() for line in error.partition("run:")[2].splitlines()]
    left_out = ("PYTHONPATH", "NETWORK_GUARD_REPORT")
    unguarded = {name: value for name, value in os.environ.items() if name not in left_out}
    for line in lines[:-1]:
        subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True, env=unguarded)
    stage(*command)
    assert read_table(tmp_path / "out")["language"].to_pylist() == [*texts.values()]
    damaged = tmp_path / ".cache/classifiers/lid.176.ftz"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert "is damaged, or is a different model" in stage(*command, "--overwrite", expect=3).stderr
