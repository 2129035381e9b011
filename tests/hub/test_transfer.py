# covers: lib/hub/repository.py, lib/hub/transfer.py
"""Download files, from a stand-in for the Hub in this process."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.core.errors import ArtifactError, UsageError
from lib.hub.repository import RemoteFile, Repository, select_by_globs
from lib.hub.transfer import Transfer, fetch_headers, prepare_directory

CONTENT = bytes(range(256)) * 4096  # 1 MiB


class Wire:
    """Replaces `Hub`: delivers files in chunks, and can fail in the middle of one."""

    def __init__(self, content: bytes = CONTENT, dies_in: str = "") -> None:
        self.content = content
        self.dies_in = dies_in
        self.asked: list[str] = []  # paths of files
        self.starts: list[int] = []  # sizes of the parts that were asked for
        self.lock = threading.Lock()

    def download(self, repository, file, directory: Path, count: Callable[[int], None]) -> Path:
        with self.lock:
            self.asked.append(file.path)
        assert not directory.exists()
        path = directory / file.path
        for record in (path, directory / ".cache/huggingface/record"):
            record.parent.mkdir(parents=True)
            record.touch()
        content = self.content[: file.size]
        with path.open("wb") as out:
            for at in range(0, len(content), 1 << 14):
                count(out.write(content[at : at + (1 << 14)]))
                if self.dies_in == file.path:
                    raise ConnectionError("killed")
        return path

    def read_start(self, repository, file, size) -> bytes:
        self.starts.append(size)
        return self.content[:size]


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hf"))


def remote(content: bytes = CONTENT, path: str = "a/model.bin") -> RemoteFile:
    return RemoteFile(path, len(content), hashlib.sha256(content).hexdigest(), "")


def transfer_files(wire: Wire, **options) -> Transfer:
    return Transfer(wire, Repository("org/x", "0" * 40, {}), **options)


def list_files(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def test_files_are_downloaded_the_largest_first(tmp_path):
    wire = Wire()
    files = [remote(CONTENT[:size], f"a/{size}") for size in (5, 1 << 16, 0, 100)]
    transfer = transfer_files(wire)
    transfer._workers = 1
    entries = transfer.fetch(files, tmp_path)
    assert wire.asked == ["a/65536", "a/100", "a/5", "a/0"]
    assert [entry["digest"] for entry in entries] == [f"sha256:{file.sha256}" for file in files]
    assert list_files(tmp_path) == ["a/0", "a/100", "a/5", "a/65536"]  # and no records
    assert transfer.bytes_from["the Hub"] == 5 + 65536 + 100


@pytest.mark.parametrize("dies_in", ["a/0", "a/4"])
def test_complete_files_are_kept_when_another_one_fails(tmp_path, dies_in):
    files = [remote(path=f"a/{number}") for number in range(5)]
    failing = transfer_files(Wire(dies_in=dies_in), workers=4)
    with pytest.raises(ConnectionError):
        failing.fetch(files, tmp_path)
    complete = list_files(tmp_path)
    assert dies_in not in complete and set(complete) <= {file.path for file in files}
    (tmp_path / "a/.0.download/a").mkdir(parents=True)  # as a kill leaves it
    (tmp_path / "a/.0.download/a/0").write_bytes(CONTENT)
    missing = prepare_directory(files, tmp_path)
    assert missing == (5 - len(complete)) * len(CONTENT) and list_files(tmp_path) == complete
    assert not (tmp_path / "a/.0.download").exists()
    wire = Wire()
    again = transfer_files(wire, workers=4)
    again.fetch(files, tmp_path)
    assert set(wire.asked) == {file.path for file in files} - set(complete)
    assert again.bytes_from["an earlier run"] == len(complete) * len(CONTENT)


def test_damage_in_a_file_of_an_earlier_run_is_repaired(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/model.bin").write_bytes(CONTENT[:-1] + b"\1")
    wire = Wire()
    transfer_files(wire).fetch([remote()], tmp_path)
    assert wire.asked == ["a/model.bin"]
    assert (tmp_path / "a/model.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("content", [b"\1" + CONTENT[1:], CONTENT[:-1], b""])
def test_repeated_damage_is_an_error_and_leaves_nothing(tmp_path, content):
    wire = Wire(content)
    transfer = transfer_files(wire, workers=3)
    with pytest.raises(ArtifactError, match="is damaged"):
        transfer.fetch([remote()], tmp_path)
    assert not list_files(tmp_path) and wire.asked == ["a/model.bin"] * 2
    assert transfer.bytes_from["the Hub"] == 0


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
    assert not wire.asked and (tmp_path / "new/a/model.bin").read_bytes() == CONTENT
    transfer_files(wire, reuse_from=reuse_from[:1]).fetch([remote()], tmp_path / "newer")
    assert wire.asked and (tmp_path / "bad/a/model.bin").read_bytes()[:1] == b"\1"


def test_globs_without_a_match_are_refused():
    with pytest.raises(UsageError, match=r"en/\*") as caught:
        select_by_globs([RemoteFile("README.md", 1, "", "")], ["en/*"], "org/text")
    assert caught.value.found == "README.md"


@pytest.mark.parametrize("path", ["/tmp/x", "../x", "a/../../x", "a\\\\x", ""])
def test_nothing_is_written_outside_the_directory(tmp_path, path):
    wire = Wire(b"abc")
    with pytest.raises(UsageError, match="unsafe paths"):
        transfer_files(wire).fetch([remote(b"abc", path)], tmp_path / "in")
    assert not wire.asked and not list(tmp_path.iterdir())


@pytest.mark.parametrize("length", [10, 1 << 17, len(CONTENT)])
def test_only_the_headers_are_downloaded(tmp_path, length):
    content = length.to_bytes(8, "little") + CONTENT
    wire = Wire(content)
    fetch_headers(wire, Repository("org/x", "0" * 40, {}), [remote(content, "x")], tmp_path)
    downloaded = (tmp_path / "x").read_bytes()
    assert content.startswith(downloaded) and min(len(content), 8 + length) <= len(downloaded)
    assert wire.starts[0] == 1 << 16 and len(wire.starts) <= 2
    assert wire.starts[-1] == len(downloaded) == max(1 << 16, length + 8)
