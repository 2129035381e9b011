# covers: lib/core/data_names.py
"""Recognise training, validation and test data by the names of files."""

from __future__ import annotations

import pytest

from lib.core.data_names import assign_roles, find_descriptions, find_role, find_unpaired

LETTERS = {"train": "t", "validation": "v", "test": "x", "": "-"}


def describe(*paths: str) -> str:
    """Return a letter per file: t(rain), v(alidation), x for test, - for none."""
    roles = assign_roles(paths)
    return "".join(LETTERS[roles.get(path, "")] for path in paths)


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        ("train.jsonl valid.jsonl test.jsonl", "tvx"),
        ("train.jsonl val.json.gz test.csv", "tvx"),
        ("data/train-00000-of-00003.parquet data/test-00000-of-00001.parquet", "tx"),
        ("corpus.train.txt corpus.dev.txt corpus.test.txt corpus.txt", "tvx-"),
        ("train_0001.json.gz train_0002.json.gz test_0001.json.gz", "ttx"),
        ("wiki.train.tokens wiki.valid.tokens wiki.test.tokens", "tvx"),
        ("train.en train.de dev.en tst2013.en", "ttvx"),
        ("Train.csv TEST.csv trainData.csv testSet.csv", "txtx"),
        ("mnli_train.jsonl mnli_dev_matched.jsonl mnli_held-out.jsonl", "tvx"),
        ("train_sft-0.parquet test_sft-0.parquet train_gen-0.parquet", "txt"),
        ("train/a.txt validation/b.txt test/c/d.txt", "tvx"),
        ("x/train/a y/train/a y/test/a", "-tx"),
        ("train-clean-100/a dev-clean/b test-other/c test-clean/c", "tvxx"),
        ("train/part-0.jsonl test.jsonl", "tx"),
        ("train/test.jsonl train/train.jsonl test/train.jsonl", "xtx"),
        ("corpus/a.txt valid/a.txt test/a.txt", "-vx"),
        ("train/a.py test/a.py", "tx"),
        # No splits: only one word, source code, words in other words, texts about anything.
        ("test/test_smoke.py test/conftest.py src/a.py", "---"),
        ("train.py test.py eval.py latest.txt contest.txt", "-----"),
        ("dev/tool.py test/a.py src/b.py", "---"),
        ("train_to_busan.txt test_of_time.txt", "--"),
        ("test.jsonl", "-"),
        ("a/train.jsonl b/test.jsonl", "--"),
    ],
)
def test_splits_are_recognised_side_by_side(paths: str, expected: str) -> None:
    assert describe(*paths.split()) == expected


def test_data_that_is_named_as_test_and_stands_alone_is_found() -> None:
    paths = ["corpus.jsonl", "test.jsonl", "a/test/x.csv", "test/smoke.py", "test.md"]
    assert find_unpaired(paths, assign_roles(paths)) == ["test.jsonl", "a/test/x.csv"]


def test_the_stricter_word_counts() -> None:
    assert find_role("train_test.jsonl") == "test" and find_role("attest.txt") == ""
    assert find_role("VALID_data") == "validation" and find_role("datensätze_train") == "train"


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        ("README.md LICENSE train.jsonl", "README.md LICENSE"),
        ("README.md data/a.parquet data/b.csv.gz data/b.csv.gz.md5", "README.md data/b.csv.gz.md5"),
        (
            "_SUCCESS dataset_infos.json croissant.json part-0.json.gz",
            "_SUCCESS dataset_infos.json",
        ),
        ("README.md a.md b.md", ""),
        ("README.md setup.py data/a.csv data/README.md", "data/README.md"),
        ("README.md notes.txt a.jsonl", ""),
        ("CARD/README.md CARD/load.py CARD/data/a.jsonl", "CARD/README.md"),
        ("state.json index.json other.yaml", ""),
    ],
)
def test_descriptions_lie_beside_records(paths: str, found: str) -> None:
    descriptions = find_descriptions(paths.split(), lambda path: path.startswith("CARD"))
    assert descriptions >= set(found.split()) and bool(descriptions) == bool(found)
