# covers: 02_build_hf_dataset.py, lib/curate/near/build.py, lib/curate/near/plan.py
# covers: lib/curate/near/rows.py, lib/curate/near/output.py, lib/curate/near/signatures.py
# covers: lib/curate/near/shingle_sets.py
"""Stage 02 with --dedup near drops the same rows on several machines, after kills, and again."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from lib.curate.near.build import Planner

from lib.core.errors import ArtifactError
from lib.corpus import dataset as dataset_module
from lib.corpus import inputs, shards, split_parts, work_units
from lib.corpus.dataset import PLAN, DatasetWriter
from lib.corpus.row_options import RowOptions
from lib.curate.near import build as near_build
from lib.curate.near import disk_array, key_groups, leaders
from tests.conftest import StageRunner
from tests.training import read_dataset_files

SCRIPT = "02_build_hf_dataset.py"
OPTIONS = ("--dedup", "near", "--validation-percent", 10, "--keep-source", "--min-chars", 3)
THRESHOLD = 0.8


def make_words(draw: random.Random, count: int) -> list[str]:
    return [f"w{draw.randrange(50_000)}" for _ in range(count)]


def change_words(draw: random.Random, words: Sequence[str], count: int) -> list[str]:
    """Return the words with some replaced by new ones."""
    changed = list(words)
    for index in draw.sample(range(len(words)), count):
        changed[index] = f"n{draw.randrange(10**9)}"
    return changed


def compute_similarity(one: str, two: str) -> float:
    """Return the Jaccard similarity of two texts of plain words."""
    sets = []
    for words in (one.split(), two.split()):
        sets.append({tuple(words[i : i + 5]) for i in range(len(words) - 4)} or {tuple(words)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def make_texts(draw: random.Random, clusters: int) -> list[str]:
    """Return texts with similar ones: pairs of all similarities, chains, copies, templates."""
    texts = []
    for number in range(clusters):
        base = make_words(draw, draw.randint(3, 200))
        for _ in range(draw.randint(0, 4)):
            changes = draw.randint(0, max(1, len(base) // 15))
            texts.append(" ".join(change_words(draw, base, changes)))
        texts.append(" ".join(base))
        if number % 5 == 0:
            link = base
            for _ in range(10):  # each similar to the one before
                link = change_words(draw, link, max(1, len(base) // 60))
                texts.append(" ".join(link))
        if number % 7 == 0:
            texts += [" ".join(base)] * 3
    draw.shuffle(texts)
    return texts


def keep_leaders(texts: Sequence[str]) -> list[int]:
    """Return the texts that a walk keeps if it compares each text with all kept ones before it."""
    leaders: list[int] = []
    for number, text in enumerate(texts):
        if all(compute_similarity(text, texts[leader]) < THRESHOLD for leader in leaders):
            leaders.append(number)
    return leaders


def write_lines(path: Path, texts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def read_table(directory: Path) -> pa.Table:
    shards = sorted(directory.glob("data-*.arrow"))
    return pa.concat_tables([pa.ipc.open_stream(shard.read_bytes()).read_all() for shard in shards])


def read_dropped(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "dropped.jsonl").read_text().splitlines()]


def build_dataset(folder: Path, out: Path, shape: RowOptions, units: int | None = None) -> None:
    """Build a dataset in this process. units: the second pass stops after them, as if killed."""
    files, _ = inputs.find_inputs(folder, False)
    out.mkdir(exist_ok=True)
    with DatasetWriter(out, shape, deletes_parts=True) as dataset:
        tasks = work_units.cut_files(folder, files, out / PLAN / "parts", shape)
        work = Planner(out / PLAN, shape, files, 1)
        if not work.is_collected:
            for task in tasks:
                split_parts.process_unit(task)
        dataset.follow(work.make_plan(split_parts.read_results(tasks), False))
        for result in split_parts.read_results(tasks[dataset.units : units]):
            dataset.add(result)
        if units is None:
            dataset.finish()


def test_the_kept_rows_are_the_leaders_of_a_walk_over_all_pairs(tmp_path):
    """With many bands, no pair of the threshold is missed."""
    texts = make_texts(random.Random(0), 60)
    write_lines(tmp_path / "raw/a.jsonl", texts[:200])
    write_lines(tmp_path / "raw/b.jsonl", texts[200:])
    shape = RowOptions(dedup="near", near_bands=100, near_band_size=2, near_candidates=1000)
    build_dataset(tmp_path / "raw", tmp_path / "out", shape)
    leaders = keep_leaders(texts)
    assert len(leaders) < 0.6 * len(texts)
    table = read_table(tmp_path / "out")
    assert table["text"].to_pylist() == [texts[number] for number in leaders]

    sizes = dict.fromkeys(leaders, 1)
    dropped = read_dropped(tmp_path / "out")
    positions = {"a.jsonl": -1, "b.jsonl": 199}
    for line in dropped:
        number = positions[line["path"]] + line["position"]
        leader = positions[line["duplicate_of"]["path"]] + line["duplicate_of"]["position"]
        sizes[leader] += 1  # raises KeyError unless it is kept
        assert leader < number and line["value"] >= THRESHOLD
        assert line["value"] == round(compute_similarity(texts[number], texts[leader]), 4)
        assert line["rule"] == "duplicate" or texts[number] != texts[leader]
    assert len(dropped) == len(texts) - len(leaders)
    assert {line["rule"] for line in dropped} == {"duplicate", "near duplicate"}
    assert table["cluster_size"].to_pylist() == [*sizes.values()]


def test_every_pair_above_085_is_found_with_the_default_bands(tmp_path):
    draw = random.Random(1)
    texts = []
    for _ in range(300):
        base = make_words(draw, 150)
        texts += [" ".join(base), " ".join(change_words(draw, base, 2))]
    write_lines(tmp_path / "raw/a.jsonl", texts)
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(dedup="near"))
    similar = [i for i in range(0, 600, 2) if compute_similarity(texts[i], texts[i + 1]) >= 0.85]
    positions = {line["position"] - 1 for line in read_dropped(tmp_path / "out")}
    assert len(similar) > 250 and positions <= {*range(1, 600, 2)}
    assert sum(i + 1 in positions for i in similar) >= 0.97 * len(similar)


def test_texts_of_any_length_and_script(tmp_path):
    texts = [
        *("one two", "One,  two!", "one two three", "!!!", "???", "!!!"),
        "日本語の文章には単語の間に空白がないので、文字を一つずつ比べることにしました。終わり",
        "日本語の文章には単語の間に空白がないので、文字を一つずつ比べることにしました。終わる",
        "ข้อความภาษาไทยที่ยาวพอสำหรับการเปรียบเทียบ" * 3,
        "ข้อความภาษาไทยที่ยาวพอสำหรับการเปรียบเทียบ" * 3 + "ๆ",
        "Čeština má háčky a čárky nad písmeny, jak každý ví",
        "Cestina ma hacky a carky nad pismeny, jak kazdy vi",
        "price 1.50 EUR for item 7 on page 12 of the list",
        "price 2.50 EUR for item 8 on page 13 of the list",
    ]
    write_lines(tmp_path / "raw/a.jsonl", texts)
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(dedup="near"))
    dropped = {line["position"] - 1: line for line in read_dropped(tmp_path / "out")}
    assert {*dropped} == {1, 5, 7, 9}
    assert dropped[1]["value"] == 1 and dropped[1]["rule"] == "near duplicate"
    assert dropped[5]["rule"] == "duplicate"


def test_conversations_are_compared_by_their_text(tmp_path):
    draw = random.Random(2)
    question = " ".join(make_words(draw, 40))
    answer = " ".join(make_words(draw, 60))
    answers = [answer, answer, answer + " end", " ".join(make_words(draw, 60))]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        for answer in answers
    ]
    lines = [json.dumps({"messages": chat}) for chat in chats]
    lines[1:1] = ["bad", json.dumps({"messages": []})]
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text("\n".join(lines))
    build_dataset(tmp_path / "raw", tmp_path / "out", RowOptions(format="chat", dedup="near"))
    table = read_table(tmp_path / "out")
    assert table["cluster_size"].to_pylist() == [3, 1]
    assert [turns[1]["content"] for turns in table["messages"].to_pylist()] == [
        answer,
        answers[3],
    ]
    assert [(line["position"], line["rule"]) for line in read_dropped(tmp_path / "out")] == [
        (2, "duplicate"),
        (3, "near duplicate"),
    ]


@pytest.fixture
def spread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of several units, one of them a span of a larger file."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 30_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 30_000)
    texts = make_texts(random.Random(3), 100)
    write_lines(tmp_path / "raw/web/a.jsonl", texts[:300])
    write_lines(tmp_path / "raw/web/b.jsonl", texts[250:])
    write_lines(tmp_path / "raw/wiki/c.jsonl", texts[:100])
    for number, text in enumerate(texts[:30]):
        (tmp_path / f"raw/{number}.txt").write_text(text + " end")
    return tmp_path / "raw"


SHAPE = RowOptions(dedup="near", validation_percent=20, keep_source=True, near_keep="upsample")


def test_positions_count_from_the_beginning_of_a_large_file(spread, tmp_path):
    build_dataset(spread, tmp_path / "out", RowOptions(dedup="near"))
    lines = {path.name: path.read_text().splitlines() for path in (spread / "web").iterdir()}
    dropped = [line for line in read_dropped(tmp_path / "out") if line["path"].startswith("web")]
    assert max(line["position"] for line in dropped) > 280
    for line in dropped:
        texts = []
        for place in (line, line["duplicate_of"]):
            if place["path"].startswith("web"):
                text = lines[place["path"].partition("/")[2]][place["position"] - 1]
                texts.append(json.loads(text)["text"])
            else:
                texts.append((spread / place["path"]).read_text())
        assert round(compute_similarity(*texts), 4) == line["value"]


@pytest.mark.parametrize("notes", [1, pytest.param(1 << 40, marks=pytest.mark.slow)])
def test_a_build_stopped_anywhere_gives_the_same_bytes(spread, tmp_path, monkeypatch, notes):
    monkeypatch.setattr(dataset_module, "NOTE_BYTES", notes)
    build_dataset(spread, tmp_path / "whole", SHAPE)
    expected = read_dataset_files(tmp_path / "whole")
    note = Planner._note
    steps = []

    def stop(self: Planner, **facts: object) -> None:
        """Stop after a step, before or after it was recorded."""
        if steps and steps[0] in facts:
            if steps.pop() == "sets":
                note(self, **facts)
            raise KeyboardInterrupt
        note(self, **facts)

    monkeypatch.setattr(Planner, "_note", stop)
    for step in ("rows", "pairs", "sets", "walk"):
        steps.append(step)
        with pytest.raises(KeyboardInterrupt):
            build_dataset(spread, tmp_path / "out", SHAPE)
    state = tmp_path / "out" / PLAN / "state.json"
    recorded = state.read_text()
    assert '"first_new": 0' in recorded
    state.write_text(recorded.replace('"first_new": 0', '"first_new": 1'))
    for units in (0, 2, 5):
        build_dataset(spread, tmp_path / "out", SHAPE, units)
    parts = [*(tmp_path / "out" / PLAN / "parts").iterdir()]
    assert notes > 1 or not any(path.name.startswith("00000000") for path in parts)
    build_dataset(spread, tmp_path / "out", SHAPE)
    assert read_dataset_files(tmp_path / "out") == expected


def test_a_full_disk_loses_no_work(spread, tmp_path, monkeypatch):
    """Arrays that are written through a map reserve their space, so a full disk is an error."""
    build_dataset(spread, tmp_path / "whole", SHAPE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", raise_disk_full)
        with pytest.raises(OSError, match="No space left"):
            build_dataset(spread, tmp_path / "out", SHAPE)
    monkeypatch.setattr(split_parts, "process_unit", lambda unit: pytest.fail("read again"))
    build_dataset(spread, tmp_path / "out", SHAPE)
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


def raise_disk_full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_nothing_to_compare_is_reported_as_without_the_option(stage, tmp_path):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.txt").write_text(" ")
    done = stage(SCRIPT, "--data-folder", "raw", "--dedup", "near", "--save-dir", "x", expect=2)
    assert "contains text" in done.stderr and "Traceback" not in done.stderr


def test_work_of_another_version_is_not_reused(spread, tmp_path, monkeypatch):
    build_dataset(spread, tmp_path / "out", SHAPE, 0)
    monkeypatch.setattr(near_build, "_VERSION", near_build._VERSION + 1)
    files, _ = inputs.find_inputs(spread, False)
    assert not Planner(tmp_path / "out" / PLAN, SHAPE, files, 1).is_collected


def use_small_blocks(rank: int) -> None:
    """Use files, blocks and a cache as in a build of millions of rows; private names set them."""
    key_groups.SORTED_AT_ONCE = 20
    key_groups.BLOCK = 30
    disk_array.BLOCK = 30
    near_build._DOCUMENTS_AT_ONCE = 40
    leaders._CACHED_BYTES = 2000


@pytest.mark.slow
def test_machines_and_workers_give_the_same_bytes(stage: StageRunner, tmp_path: Path, spread: Path):
    spread.rename(tmp_path / "raw_text")
    stage("01_organize_data.py", "--num-dirs", 4)
    done = stage(SCRIPT, *OPTIONS, "--save-dir", "one")
    assert "97.5 % at 0.8" in done.stdout and "rows dropped by --dedup near" in done.stdout
    one = read_dataset_files(tmp_path / "one")
    for workers in (2, 5):
        before = "tests.test_stage_02_near:use_small_blocks" if workers == 2 else ""
        line = (*OPTIONS, "--save-dir", f"n{workers}", "--num-workers", workers)
        stage(SCRIPT, *line, before=before)
        assert read_dataset_files(tmp_path / f"n{workers}") == one
    for splits in ("2-3", "0,1"):
        stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--only-splits", splits)
    # Parts do not depend on the choices among their rows.
    stage(SCRIPT, *OPTIONS, "--near-threshold", 0.9, "--save-dir", "many", "--merge", "--dry-run")
    stage(SCRIPT, *OPTIONS, "--save-dir", "many", "--merge")
    assert read_dataset_files(tmp_path / "many") == one
    assert not list(tmp_path.glob("many.*")) and not list(tmp_path.glob("one.*"))
    assert "already done" in stage(SCRIPT, *OPTIONS, "--save-dir", "many").stdout
    manifest = json.loads((tmp_path / "one/manifest.json").read_text())
    assert manifest["summary"]["near"]["compared_pairs"] > 100
    assert {"dropped.jsonl", "near/train.keys"} <= {entry["path"] for entry in manifest["files"]}


def test_new_rows_are_dropped_against_an_earlier_dataset(stage: StageRunner, tmp_path: Path):
    draw = random.Random(4)
    base = [make_words(draw, 100) for _ in range(40)]
    old = [" ".join(words) for words in base[:30]]
    new = [" ".join(change_words(draw, words, 1)) for words in base[20:]] + [old[0]]
    write_lines(tmp_path / "raw/old/a.jsonl", [*old, *old[:3]])
    write_lines(tmp_path / "raw/new/b.jsonl", new)
    common = ("--dedup", "near", "--keep-source", "--validation-percent", 20)
    stage(
        SCRIPT, *common, "--near-keep", "upsample", "--data-folder", "raw/old", "--save-dir", "old"
    )
    before = read_dataset_files(tmp_path / "old")
    add = ("--data-folder", "raw/new", "--save-dir", "new", "--near-against", "old")
    stage(SCRIPT, *common, *add)
    dropped = read_dropped(tmp_path / "new")
    assert sorted(line["position"] for line in dropped) == [*range(1, 11), 21]
    for line in dropped:
        other = line["duplicate_of"]
        assert other["dataset"] == "old" and other["path"] == "a.jsonl"
        text = new[line["position"] - 1]
        assert line["value"] == round(compute_similarity(text, old[other["position"] - 1]), 4)
    assert read_dataset_files(tmp_path / "old") == before
    summary = json.loads((tmp_path / "new/manifest.json").read_text())["summary"]
    assert (summary["rows"], summary["near"]["earlier_rows"]) == (10, 30)
    (tmp_path / "old").rename(tmp_path / "moved")
    refused = stage(SCRIPT, *common, *add, expect=3)
    assert "old does not exist" in refused.stderr
    (tmp_path / "moved").rename(tmp_path / "old")
    assert "already done" in stage(SCRIPT, *common, *add).stdout


def test_signatures_of_other_parameters_are_refused_by_name(tmp_path, stage):
    write_lines(tmp_path / "raw/a.jsonl", ["some words of a text"])
    common = ("--data-folder", "raw", "--dedup", "near")
    stage(SCRIPT, *common, "--save-dir", "old", "--near-bands", 7)
    stage(SCRIPT, "--data-folder", "raw", "--save-dir", "plain")
    done = stage(SCRIPT, *common, "--save-dir", "new", "--near-against", "old", expect=2)
    assert "expected: --near-bands 20" in done.stderr and "found:    --near-bands 7" in done.stderr
    assert "--near-against old --near-bands 7" in done.stderr
    assert not (tmp_path / "new").exists()
    done = stage(SCRIPT, *common, "--save-dir", "new", "--near-against", "plain", expect=3)
    assert "has no signatures" in done.stderr
    done = stage(SCRIPT, *common, "--save-dir", "old", "--near-against", "./old", expect=2)
    assert "--near-against old is the --save-dir" in done.stderr
    done = stage(SCRIPT, "--data-folder", "raw", "--save-dir", "x", "--near-bands", 7, expect=2)
    assert "--near-bands needs --dedup near" in done.stderr


def limit_open_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))


def test_many_bands_raise_the_limit_of_open_files(tmp_path, stage):
    write_lines(tmp_path / "raw/a.jsonl", ["some words of a text", "some words of a text too"])
    common = (SCRIPT, "--data-folder", "raw", "--dedup", "near", "--save-dir", "new")
    options = {"before": "tests.test_stage_02_near:limit_open_files"}
    done = stage(*common, "--near-bands", 400, "--near-threshold", 0, **options, expect=2)
    assert "--near-bands 400" in done.stderr and "--near-threshold 0" in done.stderr
    stage(*common, "--near-bands", 300, **options)


@pytest.mark.parametrize("damage", ["cut", "swap"])
def test_damaged_signatures_are_refused(tmp_path, stage, damage):
    write_lines(tmp_path / "raw/a.jsonl", ["some words of a text", "and some others"])
    stage(SCRIPT, "--data-folder", "raw", "--dedup", "near", "--save-dir", "old")
    keys = tmp_path / "old/near/train.keys"
    keys.write_bytes(keys.read_bytes()[:-8] if damage == "cut" else keys.read_bytes()[::-1])
    add = ("--data-folder", "raw", "--dedup", "near", "--save-dir", "new", "--near-against", "old")
    done = stage(SCRIPT, *add, expect=3)
    assert "train.keys" in done.stderr and "Traceback" not in done.stderr


def test_within_a_source_only_its_rows_are_compared(spread, tmp_path):
    build_dataset(spread, tmp_path / "out", RowOptions(dedup="near", near_within="source"))
    dropped = read_dropped(tmp_path / "out")
    pairs = {(line["path"], line["duplicate_of"]["path"]) for line in dropped}
    sources = {tuple(path.rpartition("/")[0] for path in pair) for pair in pairs}
    assert sources == {("web", "web"), ("wiki", "wiki"), ("", "")} - (
        {("", "")} if not any("/" not in pair[0] for pair in pairs) else set()
    )
    assert ("web/b.jsonl", "web/a.jsonl") in pairs


@pytest.mark.parametrize(
    ("size", "copies"),
    [(1, 1), (2, 2), (3, 3), (4, 3), (5, 5), (99, 5), (100, 8), (999, 8), (1000, 1)],
)
def test_upsampling_repeats_a_row_by_the_size_of_its_cluster(tmp_path, size, copies):
    text = " ".join(make_words(random.Random(5), 30))
    texts = [f"{text} {'x' if number % 2 else ''}" for number in range(size)]
    write_lines(tmp_path / "raw/a.jsonl", texts)
    build_dataset(
        tmp_path / "raw", tmp_path / "out", RowOptions(dedup="near", near_keep="upsample")
    )
    table = read_table(tmp_path / "out")
    assert table.num_rows == copies
    assert {*table["text"].to_pylist()} == {texts[0]}
    assert {*table["cluster_size"].to_pylist()} == {size}


@pytest.mark.parametrize("place", [200, -300])  # in the head of a batch, and in its text
def test_a_part_that_was_damaged_after_the_first_pass_is_reported(tmp_path, place):
    write_lines(tmp_path / "raw/a.jsonl", make_texts(random.Random(7), 10))
    shape = RowOptions(dedup="near")
    files, _ = inputs.find_inputs(tmp_path / "raw", False)
    tasks = work_units.cut_files(tmp_path / "raw", files, tmp_path / "split_00", shape)
    for task in tasks:
        split_parts.process_unit(task)
    part = tasks[0].part("train")
    data = bytearray(part.read_bytes())
    data[place : place + 100] = b"x" * 100
    part.write_bytes(data)
    work = Planner(tmp_path / "plan", shape, files, 1)
    with pytest.raises(ArtifactError, match="train is damaged or gone"):
        work.make_plan(split_parts.read_results(tasks), False)


def test_a_large_text_is_kept_and_written_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("lib.corpus.parts.LARGE_PART", 1000)
    monkeypatch.setattr("lib.corpus.selection.MOST_CHARACTERS", 5000)
    monkeypatch.setattr("lib.corpus.raw_file.LARGE_BYTES", 20_000)
    monkeypatch.setattr("lib.corpus.readers.LARGE_BYTES", 20_000, raising=False)
    draw = random.Random(6)
    text = " ".join(make_words(draw, 6000))
    files = {"a": text, "b": text + " end", "c": text, "d": "short text of a few words"}
    for name, content in files.items():
        path = tmp_path / f"raw/{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    shape = RowOptions(dedup="near", near_keep="upsample", keep_source=True)
    build_dataset(tmp_path / "raw", tmp_path / "out", shape)
    table = read_table(tmp_path / "out")
    assert table["source"].to_pylist() == ["a.txt", "a.txt", "b.txt", "d.txt"]
    assert table["text"].to_pylist() == [text, text, files["b"], files["d"]]
    assert table["cluster_size"].to_pylist() == [2, 2, 1, 1]
