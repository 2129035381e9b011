# covers: lib/tokens/raw_reader.py, lib/tokens/raw_shards.py
"""Spans of raw shards, read from any document on."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.tokens import raw_reader, raw_shards
from lib.tokens.raw_reader import SkippedRecords
from lib.tokens.raw_shards import Span

from .conftest import lines, texts


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_a_line_belongs_to_the_span_where_it_begins(tmp_path: Path, ending: bytes):
    content = lines(texts("a", 30))[:-1] + ending
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    for size in (1, 7, 50, 64, 1000):
        spans = [
            Span("a.jsonl", at, min(at + size, len(content))) for at in range(0, len(content), size)
        ]
        read = [
            b"".join(
                block.content for block in raw_reader.read_blocks(path, span, None, "text", print)
            )
            for span in spans
        ]
        assert b"".join(read) == content


def test_a_shrunk_shard_is_reported(tmp_path: Path):
    """The rest of a span is read before the error. Spans beyond the end give nothing."""
    content = lines(texts("a", 30))
    path = tmp_path / "a.jsonl"
    half = len(content) // 2
    path.write_bytes(content[:half])
    for start, end, size in ((0, len(content), half), (half + 1, len(content), 0)):
        read: list[bytes] = []
        blocks = raw_reader.read_blocks(path, Span("a.jsonl", start, end), None, "text", print)
        with pytest.raises(EOFError, match=f"had {len(content):,} when"):
            read.extend(block.content for block in blocks)
        assert sum(map(len, read)) == size


def test_skipped_records_add_up():
    skipped = SkippedRecords()
    skipped.add("a", "one")
    skipped.add("a", "two", 3)
    assert (skipped.counts, skipped.first) == ({"a": 4}, {"a": "one"})


def test_validation_and_test_data_and_descriptions_are_not_streamed(tmp_path: Path) -> None:
    for name in ("train.jsonl", "valid.jsonl", "test/0.jsonl", "dataset_infos.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    shards = raw_shards.open_directory(tmp_path)
    assert {span.path for span in shards.spans} == {"train.jsonl"}
    assert len(raw_shards.open_directory(tmp_path / "valid.jsonl").spans) == 1
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(UsageError, match="no training data"):
        raw_shards.open_directory(tmp_path)


LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 73400320\n"


@pytest.mark.parametrize("name", ["b.jsonl", "b.parquet", "b.jsonl.gz", "b.json.zst"])
def test_a_pointer_in_place_of_a_shard_is_refused_with_the_cure(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(texts("a", 3)))
    (tmp_path / name).write_text(LFS)
    with pytest.raises(ArtifactError, match="1 file without data") as caught:
        raw_shards.open_directory(tmp_path)
    assert name in caught.value.found and "git lfs pull" in caught.value.hint
    # A file that is fetched from the Hub is only seen here.
    with pytest.raises(ValueError, match="git lfs pull"):
        next(raw_reader.read_blocks(tmp_path / name, Span(name), None, "text", print))


def test_a_page_in_a_compressed_shard_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b"<!doctype html><html><title>Log in</title></html>"))
    with pytest.raises(ValueError, match="Log in"):
        next(raw_reader.read_blocks(path, Span(path.name), None, "text", print))
