# covers: lib/tokens/raw_stream.py, lib/tokens/raw_shards.py, lib/tokens/batches.py
# covers: lib/tokens/raw_reader.py, lib/tokens/order.py
"""Raw shards as a stream: every document once per epoch, and a cursor exact to the token."""

from __future__ import annotations

import bz2
import gzip
import itertools
import json
import lzma
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lib.core.errors import ArtifactError, StageError, UsageError
from lib.tokens import raw_reader, raw_shards, raw_stream
from lib.tokens.batches import BEGINNING, Cursor
from lib.tokens.order import Division
from lib.tokens.raw_stream import (
    EncodedBlock,
    RawDocuments,
    RawStream,
    TokenRuns,
    encode_block,
)

from .conftest import lines, texts

CPU = torch.device("cpu")


class Letters:
    """Encodes a text as its bytes, and a 0 after it."""

    def encode(self, texts: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
        ids = np.frombuffer(b"".join(text + b"\0" for text in texts), np.uint8)
        return ids.astype(np.uint32), np.array([len(text) + 1 for text in texts])


class Inline:
    """Stands for a worker process, which answers in the order in which it is asked."""

    def __init__(self, field: str = "text") -> None:
        self.field = field
        self.answers = deque[EncodedBlock]()

    def send(self, block: raw_reader.Block) -> None:
        self.answers.append(encode_block(Letters(), self.field, block))

    def receive(self) -> EncodedBlock:
        return self.answers.popleft()

    def close(self) -> None:
        pass


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Write shards of every kind; return their directory and all texts. Spans are small."""
    monkeypatch.setattr(raw_shards, "_SPAN_BYTES", 1500)
    monkeypatch.setattr(raw_reader, "_BLOCK_BYTES", 700)
    root = tmp_path / "raw"
    all_texts = []
    (root / "sub").mkdir(parents=True)
    pack = {
        "a.jsonl": bytes,
        "b.ndjson": bytes,
        "sub/c.json": bytes,
        "d.jsonl.gz": gzip.compress,
        "e.json.bz2": bz2.compress,
        "sub/f.jsonl.xz": lzma.compress,
    }
    for name, packed in pack.items():
        all_texts += texts(name)
        (root / name).write_bytes(packed(lines(texts(name))))
    all_texts += texts("g")
    with (
        pa.OSFile(str(root / "g.jsonl.zst"), "wb") as sink,
        pa.CompressedOutputStream(sink, "zstd") as stream,
    ):
        stream.write(lines(texts("g")))
    all_texts += texts("h", 100)
    pq.write_table(
        pa.table({"n": list(range(100)), "text": texts("h", 100)}),
        root / "h.parquet",
        row_group_size=7,
    )
    (root / "notes.txt").write_text("not read")
    (root / ".hidden.jsonl").write_bytes(lines(["hidden"]))
    return root, all_texts


def part_of(
    root: Path, dp_rank: int = 0, dp_size: int = 1, workers: int = 2, field: str = "text"
) -> RawDocuments:
    part = RawDocuments(raw_shards.open_directory(root), field, 3, dp_rank, dp_size)
    part._workers = [Inline(field) for _ in range(workers)]
    return part


def documents(part: RawDocuments, epoch: int = 0) -> list[str]:
    """Return the texts of an epoch."""
    texts_read = []
    for origin in part.encoded(Cursor(epoch)):
        if origin.rank_span.epoch > epoch:
            return texts_read
        texts_read += bytes(origin.block.ids.astype(np.uint8)).decode().split("\0")[:-1]
    return texts_read


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_epoch_of_all_ranks_contains_every_document_once(mixed, ranks: int):
    root, all_texts = mixed
    parts = [documents(part_of(root, rank, ranks)) for rank in range(ranks)]
    assert sorted(itertools.chain(*parts)) == sorted(all_texts)
    assert all(len(part) > len(all_texts) // (2 * ranks) for part in parts)
    again = part_of(root, 0, ranks)
    assert documents(again, 1) != parts[0]


def test_the_order_does_not_depend_on_the_number_of_workers(mixed):
    one, many = (documents(part_of(mixed[0], workers=n)) for n in (1, 5))
    assert one == many


def test_a_cursor_continues_at_the_exact_token(mixed):
    root, _ = mixed
    runs = TokenRuns(part_of(root), Cursor())
    taken = []
    for _ in range(300):  # several epochs of some 25,000 tokens
        taken.append(runs.take(257))
    assert taken[-1][1].epoch >= 2
    for at in (0, 1, 50, 99, 180, 250):
        cursor = taken[at][1]
        restored = TokenRuns(part_of(root), Cursor(**json.loads(json.dumps(cursor._asdict()))))
        for tokens, then in taken[at + 1 : at + 40]:
            mine, here = restored.take(257)
            assert np.array_equal(mine, tokens) and here == then
    flat = np.concatenate([tokens[:-1] for tokens, _ in taken])
    assert all(taken[i][0][-1] == taken[i + 1][0][0] for i in range(299))
    assert bytes(flat.astype(np.uint8)).decode().split("\0")[:50] == documents(part_of(root))[:50]


def test_a_resume_opens_only_the_current_span(mixed, monkeypatch: pytest.MonkeyPatch):
    root, _ = mixed
    runs = TokenRuns(part_of(root), Cursor())
    for _ in range(40):
        _, cursor = runs.take(257)
    opened = []
    read = raw_reader.read_blocks

    def noted(path, span, place, *more):
        opened.append((span, place))
        return read(path, span, place, *more)

    monkeypatch.setattr(raw_reader, "read_blocks", noted)
    restored = part_of(root, workers=1)
    TokenRuns(restored, cursor).take(1)
    assert opened == [(restored.spans(0)[cursor.piece], cursor.place)]


def test_steps_are_windows_labelled_with_the_next_token(mixed):
    division = Division(micro_batch=2, accumulation=3, dp_rank=1, dp_size=2)
    stream = RawStream(part_of(mixed[0], 1, 2), 16, division, CPU)
    steps = list(stream.steps(BEGINNING, 5))
    rows = [row for step in steps for batch in step.batches for row in batch.input_ids]
    labels = [row for step in steps for batch in step.batches for row in batch.labels]
    expected = TokenRuns(part_of(mixed[0], 1, 2), Cursor()).take(5 * 6 * 16)[0]
    assert len(steps) == 5 and np.array_equal(torch.cat(rows).numpy(), expected[:-1])
    assert np.array_equal(torch.cat(labels).numpy(), expected[1:])
    assert {(step.label_tokens, step.tokens) for step in steps} == {(2 * 6 * 16,) * 2}
    assert [step.after.samples for step in steps] == [12, 24, 36, 48, 60]


class InlineFetcher:
    """Stands for the process that fetches shards, in the order in which it is asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.asked = deque[str]()

    def send(self, path: str) -> None:
        self.asked.append(path)

    def receive(self) -> Path:
        return self.root / self.asked.popleft()


@pytest.mark.parametrize("fetched", [False, True])
def test_any_steps_can_be_requested_at_any_time(mixed, fetched: bool):
    """Data read ahead for steps that a rollback discards is not mixed in."""
    root, _ = mixed
    part = part_of(root, workers=3)
    if fetched:
        part.shards = replace(part.shards, fetcher=InlineFetcher(root))
    stream = RawStream(part, 64, Division(2, 1, 0, 1), CPU)
    steps = list(stream.steps(BEGINNING, 60))
    for at in (3, 40, 10):
        again = stream.steps(steps[at].after, 15)
        for expected in steps[at + 1 : at + 6]:
            step = next(again)
            assert step.after == expected.after
            assert torch.equal(step.batches[0].labels, expected.batches[0].labels)
        again.close()


def test_skipped_records_are_counted_and_reported(tmp_path: Path, caplog, monkeypatch):
    monkeypatch.setattr(raw_reader, "LONGEST_LINE_BYTES", 3000)
    monkeypatch.setattr(raw_reader, "_BLOCK_BYTES", 1000)
    root = tmp_path / "raw"
    root.mkdir()
    bad = [
        b"{no json}\n",
        b"[1]\n",
        b'{"content": "x"}\n',
        b'{"text": 7}\n',
        b'{"text": ""}\n',
        b"\n",
        json.dumps({"text": "y" * 9000}).encode() + b"\n",
        b'{"text": "half \\ud800 of a pair"}\n',
    ]
    (root / "a.jsonl").write_bytes(lines(["first"]) + b"".join(bad) + lines(["last"])[:-1])
    cut = gzip.compress(lines(texts("b", 500)))
    (root / "b.jsonl.gz").write_bytes(cut[: len(cut) // 2])
    (root / "c.parquet").write_bytes(b"PAR1 and nothing else")
    pq.write_table(pa.table({"text": ["row", None, ""]}), root / "d.parquet")
    pq.write_table(pa.table({"words": ["row"]}), root / "e.parquet")
    part = part_of(root)
    texts_read = documents(part)
    assert {"first", "last", "row", "half ��� of a pair"} <= set(texts_read)
    readable = [text for text in texts("b", 500) if text in set(texts_read)]
    assert 100 < len(readable) < 400 and readable == texts("b", 500)[: len(readable)]
    counts = part.skipped.counts
    assert counts["a line that is not a JSON object"] == counts["no field `text`"] == 1
    assert counts["`text` that is not a string"] == counts["a line longer than 16 MB"] == 1
    assert counts["an empty text"] == 3
    assert counts["a line that is not JSON"] == 2  # the line that the damage of b cuts, too
    unreadable = "a file, or the rest of it, that cannot be read"
    assert counts[unreadable] >= 3
    monkeypatch.setattr(raw_stream.log, "warn", lambda text: caplog.records.append(text))
    part.log_skipped_records()
    part.log_skipped_records()
    assert len(caplog.records) == 1 and "a.jsonl at" in caplog.records[0]


def test_a_failing_disk_loses_no_streamed_document(mixed, failing_reads):
    """After a short failure the documents are the same. If it lasts, the run ends."""
    expected = documents(part_of(mixed[0]))
    failing_reads(2)
    part = part_of(mixed[0])
    assert documents(part) == expected and not part.skipped.counts
    failing_reads(1000)
    with pytest.raises(StageError, match="does not mean"):
        documents(part_of(mixed[0]))


def test_ignored_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    warnings: list[str] = []
    monkeypatch.setattr(raw_shards.log, "warn", warnings.append)
    (tmp_path / "z.jsonl").write_text('{"text": "x"}\n')
    raw_shards.open_directory(tmp_path)
    assert not warnings
    for number in range(7):
        (tmp_path / f"page_{number}.txt").write_text("x")
    raw_shards.open_directory(tmp_path)
    assert len(warnings) == 1 and "1 of the 8 files" in warnings[0]
    assert (
        "7 are skipped" in warnings[0]
        and "page_0.txt" in warnings[0]
        and "page_4.txt, …" in warnings[0]
    )
    raw_shards.open_repository(
        "org/name", "c", {"a.parquet": (1, "d"), "b.md": (1, "e")}, tmp_path, None
    )
    assert "1 of the 2 files" in warnings[1]


def test_shards_without_a_document_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ArtifactError, match="does not exist"):
        raw_shards.open_directory(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match="no shard"):
        raw_shards.open_directory(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"content": "x", "url": "y"}\n')
    with pytest.raises(UsageError, match="no readable document") as refusal:
        part_of(tmp_path).sample()
    assert "content, url" in refusal.value.found
    assert part_of(tmp_path, field="content").sample() == [b"x"]
    with pytest.raises(UsageError, match="1 piece"):
        part_of(tmp_path, dp_size=2)
    with pytest.raises(ArtifactError, match="contains no document"):
        documents(part_of(tmp_path))
    (tmp_path / "a.jsonl").unlink()
    pq.write_table(pa.table({"words": ["row"]}), tmp_path / "a.parquet")
    with pytest.raises(UsageError, match="no readable document") as refusal:
        part_of(tmp_path).sample()
    assert "words (a.parquet)" in refusal.value.found
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    for path in (tmp_path, tmp_path / "b.jsonl"):
        monkeypatch.setattr(
            "sys.argv",
            ["04_train_fsdp.py", "-e", "x", "-d", str(path), "--streaming", "--max-steps", "9"],
        )
        with pytest.raises(UsageError, match="not conversations") as refusal:
            part_of(path).sample()
        *alone, build, train = refusal.value.run.splitlines()  # of a file, without those beside it
        assert len(alone) == path.is_file()
        target = f"hf_datasets/{'b' if path.is_file() else tmp_path.name}"
        folder = "splits-b" if path.is_file() else tmp_path
        assert build.endswith(f"--data-folder {folder} --save-dir {target} --format chat")
        assert train.endswith(f"04_train_fsdp.py -e x -d {target} --max-steps 9")
    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "a.parquet").write_bytes(b"nothing of the kind")
    with pytest.raises(ArtifactError, match="no readable document"):
        part_of(tmp_path).sample()
    with pytest.raises(ArtifactError, match="contains no document"):
        documents(part_of(tmp_path))
    (tmp_path / "dataset_info.json").write_text("{}")
    with pytest.raises(UsageError, match="prepared"):
        raw_shards.open_directory(tmp_path)


def test_the_fingerprint_covers_the_content(mixed, tmp_path: Path):
    root, _ = mixed
    before = raw_shards.open_directory(root).fingerprint
    root.rename(tmp_path / "moved")
    assert raw_shards.open_directory(tmp_path / "moved").fingerprint == before
    content = (tmp_path / "moved/a.jsonl").read_bytes()
    (tmp_path / "moved/a.jsonl").write_bytes(content.replace(b"x", b"y", 1))
    assert raw_shards.open_directory(tmp_path / "moved").fingerprint != before
