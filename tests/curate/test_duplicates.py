# covers: lib/curate/steps/duplicates.py, lib/curate/near/search.py
# covers: lib/curate/near/compared_rows.py
# covers: lib/curate/near/signatures.py, lib/curate/near/shingle_sets.py, lib/curate/near/checks.py
# covers: lib/curate/near/report.py, lib/curate/places.py, lib/curate/machines.py
"""Duplicates are those of a walk over all pairs, on several machines, after kills, and again."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.curate.curations import (
    curate,
    curate_in_units,
    read_dropped,
    read_rows,
    write_chats,
    write_texts,
)
from tests.process_tree import measure_peak
from tests.training import read_dataset_files

NEAR = ("--dedup", "near", "--save-dir", "out")
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


def read_summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "manifest.json").read_text())["summary"]


def test_the_kept_rows_are_the_leaders_of_a_walk_over_all_pairs(tmp_path: Path) -> None:
    """With many bands, no pair of the threshold is missed. Validation rows come first."""
    texts = make_texts(random.Random(0), 60)
    first = 40  # validation rows
    write_texts(tmp_path / "raw", texts[:first], "validation")
    write_texts(tmp_path / "raw", texts[first:])
    bands = ("--near-bands", 100, "--near-band-size", 2, "--near-candidates", 1000)
    curate(tmp_path, "raw", *NEAR, *bands)
    leaders = keep_leaders(texts)
    assert len(leaders) < 0.6 * len(texts)
    tables = [read_rows(tmp_path / "out" / split) for split in ("validation", "train")]
    kept_texts = [text for table in tables for text in table["text"].to_pylist()]
    assert kept_texts == [texts[number] for number in leaders]

    sizes = dict.fromkeys(leaders, 1)
    dropped = read_dropped(tmp_path / "out")
    start = {"validation": 0, "train": first}
    for line in dropped:
        number = start[line["split"]] + line["row"]
        leader = start[line["duplicate_of"]["split"]] + line["duplicate_of"]["row"]
        sizes[leader] += 1  # raises KeyError unless it is kept
        assert leader < number and line["value"] >= THRESHOLD
        assert line["value"] == round(compute_similarity(texts[number], texts[leader]), 4)
        assert line["rule"] == "duplicate" or texts[number] != texts[leader]
    assert len(dropped) == len(texts) - len(leaders)
    assert {line["rule"] for line in dropped} == {"duplicate", "near duplicate"}
    assert any(line["duplicate_of"]["split"] != line["split"] for line in dropped)
    counts = [count for table in tables for count in table["cluster_size"].to_pylist()]
    assert counts == [*sizes.values()]

    done = curate(tmp_path, "out", "--dedup", "near", "--save-dir", "again", *bands)
    assert not read_dropped(tmp_path / "again")
    assert "already done" in curate(tmp_path, "raw", *NEAR, *bands).stdout
    for split in ("validation", "train"):
        assert read_rows(tmp_path / "again" / split) == read_rows(tmp_path / "out" / split)
    assert "Traceback" not in done.stderr


def test_exact_duplicates_alone(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", ["a b", "c", "a b", "A b", "c"])
    curate(tmp_path, "raw", "--dedup", "exact", "--save-dir", "out")
    assert read_rows(tmp_path / "out").to_pydict() == {"text": ["a b", "c", "A b"]}
    assert [line["row"] for line in read_dropped(tmp_path / "out")] == [2, 4]


def test_every_pair_above_085_is_found_with_the_default_bands(tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = []
    for _ in range(300):
        base = make_words(draw, 150)
        texts += [" ".join(base), " ".join(change_words(draw, base, 2))]
    write_texts(tmp_path / "raw", texts)
    curate(tmp_path, "raw", *NEAR)
    similar = [i for i in range(0, 600, 2) if compute_similarity(texts[i], texts[i + 1]) >= 0.85]
    dropped = {line["row"] for line in read_dropped(tmp_path / "out")}
    assert len(similar) > 250 and dropped <= {*range(1, 600, 2)}
    assert sum(i + 1 in dropped for i in similar) >= 0.97 * len(similar)


def test_texts_of_any_length_and_script(tmp_path: Path) -> None:
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
    write_texts(tmp_path / "raw", texts)
    curate(tmp_path, "raw", *NEAR)
    dropped = {line["row"]: line for line in read_dropped(tmp_path / "out")}
    assert {*dropped} == {1, 5, 7, 9}
    assert dropped[1]["value"] == 1 and dropped[1]["rule"] == "near duplicate"
    assert dropped[5]["rule"] == "duplicate"


def test_conversations_are_compared_by_their_text(tmp_path: Path) -> None:
    draw = random.Random(2)
    question = " ".join(make_words(draw, 40))
    answer = " ".join(make_words(draw, 60))
    answers = [answer, answer, answer + " end", " ".join(make_words(draw, 60))]
    chats = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": text}]
        for text in answers
    ]
    write_chats(tmp_path / "raw", chats)
    curate(tmp_path, "raw", *NEAR)
    table = read_rows(tmp_path / "out")
    assert table["cluster_size"].to_pylist() == [3, 1]
    assert [turns[1]["content"] for turns in table["messages"].to_pylist()] == [
        answer,
        answers[3],
    ]
    assert [(line["row"], line["rule"]) for line in read_dropped(tmp_path / "out")] == [
        (1, "duplicate"),
        (2, "near duplicate"),
    ]


@pytest.fixture
def spread(tmp_path: Path) -> Path:
    """Return a dataset of two splits and several sources, which is read in several units."""
    texts = make_texts(random.Random(3), 100)
    names = ("web/a", "web/b", "wiki/c", "d")
    sources = [names[i % len(names)] for i in range(len(texts))]
    write_texts(tmp_path / "raw", texts[:60], "validation", source=sources[:60])
    return write_texts(tmp_path / "raw", texts[60:], source=sources[60:])


SPREAD = ("raw", "--dedup", "near", "--near-keep", "upsample")


def use_small_blocks(rank: int) -> None:
    """Use files, blocks and a cache as in a dataset of millions of rows; private names set them."""
    from lib.curate import disk_array
    from lib.curate.near import key_groups, leaders, search
    from tests.curate.curations import cut_small_units

    cut_small_units(rank)
    key_groups.SORTED_AT_ONCE = 20
    key_groups.BLOCK = 30
    disk_array.BLOCK = 30
    search._DOCUMENTS_AT_ONCE = 40
    leaders._CACHED_BYTES = 2000


@pytest.mark.slow
def test_machines_and_workers_give_the_same_bytes(tmp_path: Path, spread: Path) -> None:
    curate_in_units(tmp_path, *SPREAD, "--save-dir", "one", "--num-workers", 1)
    one = read_dataset_files(tmp_path / "one")
    before = f"{__name__}:use_small_blocks"
    curate(tmp_path, *SPREAD, "--save-dir", "three", "--num-workers", 3, before=before)
    assert read_dataset_files(tmp_path / "three") == one
    many = (*SPREAD, "--save-dir", "many")
    for part in ("2/3", "1/3"):  # only the merge decides, so it may have another threshold
        other_options = ("raw", "--dedup", "near", "--near-threshold", 0.9, "--save-dir", "many")
        curate_in_units(tmp_path, *other_options, "--part", part)
    assert "already done" in curate_in_units(tmp_path, *many, "--part", "2/3").stdout
    refused = curate_in_units(tmp_path, *many, "--merge", expect=3)
    assert "--part 3/3" in refused.stderr
    curate_in_units(tmp_path, *many, "--part", "3/3")
    curate_in_units(tmp_path, *many, "--merge")
    assert read_dataset_files(tmp_path / "many") == one
    assert not list(tmp_path.glob("many.*")) and not list(tmp_path.glob("one.*"))
    assert "already done" in curate_in_units(tmp_path, *many, "--merge").stdout


def stop_after(rank: int) -> None:
    """Kill this process when a decision notes what the file `stop-after` names."""
    from lib.curate.whole import WholeDataset
    from tests.curate.curations import cut_small_units

    cut_small_units(rank)
    write = WholeDataset._note
    last = Path("stop-after").read_text()

    def note(self: WholeDataset, facts: dict[str, Any]) -> None:
        write(self, facts)
        if any(last in name for name in facts):
            os.kill(os.getpid(), signal.SIGKILL)

    WholeDataset._note = note


@pytest.mark.slow
def test_a_search_killed_after_any_step_gives_the_same_bytes(tmp_path: Path, spread: Path) -> None:
    curate_in_units(tmp_path, *SPREAD, "--save-dir", "whole")
    for step in ("collected", "not compared", "pairs", "sets", "walk", "decided"):
        (tmp_path / "stop-after").write_text(step)
        command = (*SPREAD, "--save-dir", "out")
        curate(tmp_path, *command, before=f"{__name__}:stop_after", expect=-signal.SIGKILL)
    curate_in_units(tmp_path, *SPREAD, "--save-dir", "out")
    assert read_dataset_files(tmp_path / "out") == read_dataset_files(tmp_path / "whole")


def test_new_rows_are_dropped_against_an_earlier_dataset(tmp_path: Path) -> None:
    draw = random.Random(4)
    base = [make_words(draw, 100) for _ in range(40)]
    old = [" ".join(words) for words in base[:30]]
    new = [" ".join(change_words(draw, words, 1)) for words in base[20:]] + [old[0]]
    write_texts(tmp_path / "first", [*old, *old[:3]])
    write_texts(tmp_path / "second", new)
    curate(tmp_path, "first", "--dedup", "near", "--near-keep", "upsample", "--save-dir", "old")
    before = read_dataset_files(tmp_path / "old")
    add = ("second", *NEAR, "--near-against", "old")
    curate(tmp_path, *add)
    dropped = read_dropped(tmp_path / "out")
    assert sorted(line["row"] for line in dropped) == [*range(10), 20]
    old_texts = read_rows(tmp_path / "old")["text"].to_pylist()
    for line in dropped:
        assert line["duplicate_of"]["dataset"] == "old"
        other = old_texts[line["duplicate_of"]["row"]]
        assert line["value"] == round(compute_similarity(new[line["row"]], other), 4)
    assert read_dataset_files(tmp_path / "old") == before
    assert read_summary(tmp_path / "out")["rows"] == 10
    assert "already done" in curate(tmp_path, *add).stdout

    options = ("--save-dir", "old", "--near-against", "./old", "--overwrite")
    refused = curate(tmp_path, "second", "--dedup", "near", *options, expect=2)
    assert "the --save-dir as well" in refused.stderr
    options = ("--save-dir", "more", "--near-against", "masked")
    curate(tmp_path, "first", "--dedup", "near", "--mask", "email", "--save-dir", "masked")
    refused = curate(tmp_path, "second", "--dedup", "near", *options, expect=2)
    assert "changed in another way" in refused.stderr and not [*tmp_path.glob("more*")]

    curate(tmp_path, "second", "--dedup", "near", "--near-bands", 7, "--save-dir", "seven")
    more = ("second", "--dedup", "near", "--save-dir", "more", "--near-against")
    refused = curate(tmp_path, *more, "seven", expect=2)
    assert refused.stderr.rstrip().endswith("--near-bands 7")
    curate(tmp_path, "second", "--dedup", "exact", "--save-dir", "plain")
    assert "no signatures" in curate(tmp_path, *more, "plain", expect=3).stderr
    keys = tmp_path / "old/near/train.keys"
    keys.write_bytes(keys.read_bytes()[::-1])
    refused = curate(tmp_path, *more, "old", expect=3)
    assert "train.keys" in refused.stderr and "Traceback" not in refused.stderr
    assert not (tmp_path / "more").exists()


def test_within_a_source_only_its_rows_are_compared(tmp_path: Path, spread: Path) -> None:
    curate(tmp_path, "raw", *NEAR, "--near-within", "source")
    rows = {split: read_rows_of(spread, split) for split in ("validation", "train")}
    dropped = read_dropped(tmp_path / "out")
    sources = set()
    for line in dropped:
        other = rows[line["duplicate_of"]["split"]][line["duplicate_of"]["row"]]
        sources.add((line["source"].rpartition("/")[0], other.rpartition("/")[0]))
    assert sources == {("web", "web"), ("wiki", "wiki"), ("", "")}


def read_rows_of(directory: Path, split: str) -> list[str]:
    """Return the sources of the rows of a split that `write_texts` has written."""
    import pyarrow as pa

    path = directory / f"rows-{split}.arrow"
    return pa.ipc.open_stream(path.read_bytes()).read_all()["source"].to_pylist()


@pytest.mark.parametrize(
    ("size", "copies"),
    [(1, 1), (2, 2), pytest.param(4, 3, marks=pytest.mark.slow), (99, 5), (999, 8), (1000, 1)],
)
def test_upsampling_repeats_a_row_by_the_size_of_its_cluster(
    tmp_path: Path, size: int, copies: int
) -> None:
    text = " ".join(make_words(random.Random(5), 30))
    texts = [f"{text} {'x' if number % 2 else ''}" for number in range(size)]
    write_texts(tmp_path / "raw", texts)
    curate(tmp_path, "raw", *NEAR, "--near-keep", "upsample")
    table = read_rows(tmp_path / "out")
    assert table.num_rows == copies and {*table["text"].to_pylist()} == {texts[0]}
    assert {*table["cluster_size"].to_pylist()} == {size}


@pytest.mark.slow
def test_copies_that_upsampling_wrote_are_not_counted_again(tmp_path: Path) -> None:
    """Curating twice changes nothing, and clusters keep their sizes without the copies."""
    draw = random.Random(6)
    sizes = [1, 2, 7, 1, 120, 3, 99, 150, 5]
    texts = [text for size in sizes for text in [" ".join(make_words(draw, 30))] * size]
    write_texts(tmp_path / "raw", texts)
    upsample = ("--dedup", "near", "--near-keep", "upsample", "--save-dir")
    curate_in_units(tmp_path, "raw", *upsample, "one")
    one = read_rows(tmp_path / "one")
    assert one.num_rows == 1 + 2 + 5 + 1 + 8 + 3 + 5 + 8 + 5
    curate(tmp_path, "one", *upsample, "two", before=f"{__name__}:use_small_blocks")
    assert read_rows(tmp_path / "two") == one
    curate_in_units(tmp_path, "two", "--dedup", "near", "--save-dir", "three")
    assert read_rows(tmp_path / "three")["cluster_size"].to_pylist() == sizes
    assert [cluster["size"] for cluster in read_summary(tmp_path / "three")["near"]["largest"]] == [
        size for size in sorted(sizes, reverse=True) if size > 1
    ]


def limit_open_files(rank: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 512))


def test_options_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    write_texts(tmp_path / "raw", ["some words of a text", "some words of a text too"])
    before = {"before": f"{__name__}:limit_open_files"}
    many = ("--near-bands", 400, "--near-threshold", 0)
    done = curate(tmp_path, "raw", *NEAR, *many, **before, expect=2)
    assert "--near-bands 400" in done.stderr and "--near-threshold 0" in done.stderr
    curate(tmp_path, "raw", *NEAR, "--near-bands", 300, **before)
    done = curate(tmp_path, "raw", "--save-dir", "x", "--near-bands", 7, expect=2)
    assert "--near-bands needs --dedup near" in done.stderr


def shrink_limits(rank: int) -> None:
    """Treat texts of some kB as larger than memory."""
    from lib.curate import reader
    from lib.curate.steps import duplicates

    reader.LARGE_BYTES = 20_000
    duplicates._MOST_CHARACTERS = 5000


def test_a_large_text_is_kept(tmp_path: Path) -> None:
    text = " ".join(make_words(random.Random(6), 6000))
    texts = [text, text + " end", text, "short text of a few words"]
    write_texts(tmp_path / "raw", texts)
    curate(tmp_path, "raw", *NEAR, "--near-keep", "upsample", before=f"{__name__}:shrink_limits")
    table = read_rows(tmp_path / "out")
    assert table["text"].to_pylist() == [text, text, texts[1], texts[3]]
    assert table["cluster_size"].to_pylist() == [2, 2, 1, 1]


@pytest.mark.slow
def test_near_duplicates_take_no_more_memory_for_three_times_the_input(tmp_path: Path) -> None:
    draw = random.Random(0)
    words = [f"word{number}" for number in range(5000)]
    curation = [sys.executable, "-m", "lib.curate"]
    peaks = {}
    # With less than 48 MB, the batches of the workers and of the main process are not full yet.
    for megabytes in (48, 144):
        texts = []
        for _ in range(megabytes * 1_000_000 // 8200):
            text = " ".join(draw.choices(words, k=300))
            texts += [text, f"{text} one", f"{text} two"]  # two of three are near duplicates
        source = write_texts(tmp_path / f"x{megabytes}", texts)
        options = ["--save-dir", f"{source}-near", "--dedup", "near", "--num-workers", "2"]
        peaks[megabytes] = measure_peak([*curation, str(source), *options], ROOT)
    assert peaks[144] < 500_000_000 and peaks[144] < 1.2 * peaks[48], peaks
