# covers: lib/hub/repository.py, lib/hub/transfer.py, lib/hub/partial.py
"""Download files in pieces, from a stand-in for the Hub in this process."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.hub import partial
from lib.hub.repository import RemoteFile, Repository
from lib.hub.transfer import Transfer, fetch_headers, prepare_directory

CONTENT = bytes(range(256)) * 4096  # 1 MiB
PIECE = 1 << 18


class Wire:
    """Replaces `Hub`: delivers a piece in chunks, and can fail in the middle."""

    def __init__(self, content: bytes = CONTENT, dies_after: int | None = None) -> None:
        self.content = content
        self.left = dies_after
        self.ranges: list[tuple[int, int]] = []
        self.lock = threading.Lock()
        self.stopped = threading.Event()

    def fetch_piece(self, repository, part, piece, advance) -> None:
        start, end = part.missing_range(piece)
        with self.lock:
            self.ranges.append((start, end))
        with part.open_piece(piece) as append:
            for at in range(start, end, 1 << 14):
                if self.left is not None:
                    self.left -= 1
                    if self.left < 0:
                        raise ConnectionError("killed")
                advance(append(self.content[at : min(at + (1 << 14), end)]))

    def read_range(self, repository, file, start, end) -> bytes:
        self.ranges.append((start, end))
        return self.content[start:end]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(partial, "PIECE_BYTES", PIECE)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))


def remote(content: bytes = CONTENT, path: str = "a/model.bin") -> RemoteFile:
    return RemoteFile(path, len(content), hashlib.sha256(content).hexdigest(), "")


def transfer_files(wire: Wire, **options) -> Transfer:
    return Transfer(wire, Repository("org/x", "0" * 40, {}), **options)


def test_a_large_file_is_downloaded_in_parallel_pieces(tmp_path):
    wire = Wire()
    entries = transfer_files(wire, workers=4).fetch([remote()], tmp_path)
    assert (tmp_path / "a/model.bin").read_bytes() == CONTENT
    assert sorted(wire.ranges) == [(at, at + PIECE) for at in range(0, len(CONTENT), PIECE)]
    assert entries[0]["digest"] == f"sha256:{remote().sha256}"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["model.bin"]


def test_a_killed_download_resumes_where_it_stopped(tmp_path):
    with pytest.raises(ConnectionError):
        transfer_files(Wire(dies_after=23), workers=2).fetch([remote()], tmp_path)
    came = 23 << 14
    assert len(CONTENT) - prepare_directory([remote()], tmp_path) == came
    wire = Wire()
    transfer_files(wire, workers=2).fetch([remote()], tmp_path)
    assert sum(end - start for start, end in wire.ranges) == len(CONTENT) - came
    assert (tmp_path / "a/model.bin").read_bytes() == CONTENT


def test_invalid_counts_restart_the_download(tmp_path):
    with pytest.raises(ConnectionError):
        transfer_files(Wire(dies_after=5)).fetch([remote()], tmp_path)
    counts = next(tmp_path.rglob("*.at"))
    counts.write_bytes(b"\xff" * len(counts.read_bytes()))
    transfer_files(Wire()).fetch([remote()], tmp_path)
    assert (tmp_path / "a/model.bin").read_bytes() == CONTENT


def test_counts_ahead_of_the_bytes_are_detected_and_repaired(tmp_path):
    """A power cut can leave counts on disk whose bytes were never written."""
    with pytest.raises(ConnectionError):
        transfer_files(Wire(dies_after=40), workers=1).fetch([remote()], tmp_path)
    part = next(tmp_path.rglob("*.part"))
    part.write_bytes(bytes(part.stat().st_size))
    wire = Wire()
    transfer_files(wire).fetch([remote()], tmp_path)
    assert (tmp_path / "a/model.bin").read_bytes() == CONTENT
    assert sum(end - start for start, end in wire.ranges) > len(CONTENT)


def test_repeated_damage_is_an_error_and_leaves_nothing(tmp_path):
    wire = Wire(content=b"\1" + CONTENT[1:])
    with pytest.raises(ArtifactError, match="is damaged"):
        transfer_files(wire, workers=3).fetch([remote()], tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(end - start for start, end in wire.ranges) == 2 * len(CONTENT)


def test_empty_files_and_git_blobs(tmp_path):
    blob = hashlib.sha1(b"blob 3\0abc").hexdigest()
    empty = hashlib.sha1(b"blob 0\0").hexdigest()
    files = [RemoteFile("empty", 0, "", empty), RemoteFile("small", 3, "", blob)]
    entries = transfer_files(Wire(b"abc")).fetch(files, tmp_path)
    assert (tmp_path / "empty").read_bytes() == b""
    assert entries[1]["digest"] == "sha256:" + hashlib.sha256(b"abc").hexdigest()


def test_an_earlier_directory_is_used_if_its_digests_match(tmp_path, capsys):
    for name, content in (("good", CONTENT), ("bad", b"\1" + CONTENT[1:])):
        (tmp_path / name / "a").mkdir(parents=True)
        (tmp_path / name / "a/model.bin").write_bytes(content)
    wire = Wire()
    reuse_from = [tmp_path / "bad", tmp_path / "good"]
    (tmp_path / "new").mkdir()
    assert prepare_directory([remote()], tmp_path / "new", reuse_from) == 0  # links take no room
    transfer_files(wire, reuse_from=reuse_from).fetch([remote()], tmp_path / "new")
    assert not wire.ranges and (tmp_path / "new/a/model.bin").read_bytes() == CONTENT
    transfer_files(wire, reuse_from=reuse_from[:1]).fetch([remote()], tmp_path / "newer")
    assert wire.ranges and (tmp_path / "bad/a/model.bin").read_bytes()[:1] == b"\1"


def test_a_thread_that_comes_late_finds_the_file_finished(tmp_path):
    part = partial.PartialFile(remote(b"abc", "x"), tmp_path)
    part.open()
    with part.open_piece(0) as append:
        assert append(b"abcdef") == 3  # what is beyond the piece is not taken
    assert part.is_complete() and part.claim() and not part.finish()
    assert part.is_complete() and not part.claim()
    assert (tmp_path / "x").read_bytes() == b"abc"


@pytest.mark.parametrize("path", ["/tmp/x", "../x", "a/../../x", "a\\\\x", ""])
def test_nothing_is_written_outside_the_directory(tmp_path, path):
    wire = Wire(b"abc")
    with pytest.raises(UsageError, match="unsafe paths"):
        transfer_files(wire).fetch([remote(b"abc", path)], tmp_path / "in")
    assert not wire.ranges and not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [10, 1 << 17, len(CONTENT)])
def test_only_the_headers_are_downloaded(tmp_path, length):
    content = length.to_bytes(8, "little") + CONTENT
    wire = Wire(content)
    fetch_headers(wire, Repository("org/x", "0" * 40, {}), [remote(content, "x")], tmp_path)
    downloaded = (tmp_path / "x").read_bytes()
    assert content.startswith(downloaded) and min(len(content), 8 + length) <= len(downloaded)
    assert (
        sum(end - start for start, end in wire.ranges)
        == len(downloaded)
        <= max(1 << 16, length + 8)
    )


def test_a_header_whose_stream_ends_early_is_continued(tmp_path):
    class Short(Wire):
        def read_range(self, repository, file, start, end) -> bytes:
            return super().read_range(repository, file, start, min(end, start + 50_000))

    content = (1 << 17).to_bytes(8, "little") + CONTENT
    wire = Short(content)
    fetch_headers(wire, Repository("org/x", "0" * 40, {}), [remote(content, "x")], tmp_path)
    assert (tmp_path / "x").read_bytes() == content[: 8 + (1 << 17)]
    assert wire.ranges[:2] == [(0, 50_000), (50_000, 65_536)]
