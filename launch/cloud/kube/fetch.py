"""Copy a directory from the volume to this machine, byte for byte.

    DIR.partial-1a2b3c4d/
        .unfinished-…     marks a directory of this project (lib/core/partial_dirs.py)
        content/          the files so far; a fetch that was interrupted continues here
        replaced/         the previous DIR (--overwrite), about to be deleted

A file is complete if its SHA-256 equals the one that the pod computed while it sent the file. DIR
gets its name once all files are complete, unless the directory on the volume has changed meanwhile.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from launch.cloud.kube import sender
from launch.cloud.kube.kubectl import Kubectl, KubectlError
from lib.core import commands, hashing, lease, log, manifest, partial_dirs, publish, records, units
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.hashing import HashedFile
from lib.core.retry import backoff, retry

RECORD = ".fetched.json"  # in each copy: its origin, and the SHA-256 of its files
_KIND = "fetched/1"
_CHUNK = 1 << 20
_LONGEST_NAME = 255  # bytes, on the file systems of Linux
_LONGEST_PATH = 3000  # bytes; with the directory of the copy at most 4096
_SILENT_S = 120.0
_ATTEMPTS = 6  # in a row without a new byte
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_LIST_PAUSES_S = (1.0, 2.0, 4.0)
_LINE_EVERY_S = 10.0
_START = "import sys; exec(sys.stdin.buffer.read(int(sys.argv[1])))"


class Interrupted(StageError):
    """A connection to the pod ended before the data did."""


def require_new(target: Path, overwrite: bool) -> None:
    """Raise UsageError if a copy must not take the name `target`."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise UsageError(
            f"{target} exists",
            expected="a new directory, or --overwrite to replace an earlier copy",
            run=commands.as_typed("--overwrite") if _is_copy(target) else "",
        )
    if not _is_copy(target):
        raise UsageError(
            f"{target} exists, and `fetch` did not make it",
            expected=f"a new directory, or an earlier copy, which contains {RECORD}",
            hint="choose another name, or move it away",
        )


def _is_copy(target: Path) -> bool:
    return records.read_mapping(target / RECORD).get("kind") == _KIND


class Source:
    """A directory on the volume, read by `sender` in a pod. path: absolute, in the pod."""

    def __init__(self, kubectl: Kubectl, pod: str, path: str) -> None:
        self.path = path
        self._kubectl = kubectl
        self._pod = pod
        self._program = Path(sender.__file__).read_bytes()

    def list_files(self) -> dict[str, list[int]]:
        """Return size and time of each file. Raises UsageError if there are none to copy."""
        answer = retry(self._query, _LIST_PAUSES_S, lambda error: isinstance(error, Interrupted))
        if error := answer.get("error"):
            raise UsageError(
                f"{self.path} is not on the volume" if error == "missing" else str(error),
                expected="a directory of files, or a file; relative paths start from the "
                "directory with outputs/",
            )
        files = _parse_files(answer.get("files"))
        if not files:
            raise UsageError(f"{self.path} contains no files")
        return files

    def _query(self) -> dict[str, Any]:
        with self._request({"path": self.path}) as stream:
            return stream.read_object()

    @contextmanager
    def send(self, files: list[tuple[str, int]]) -> Iterator[_Stream]:
        """Yield a stream of files. files: names, and the byte from which to send each file."""
        with self._request({"path": self.path, "files": files}) as stream:
            yield stream

    @contextmanager
    def _request(self, request: dict[str, Any]) -> Iterator[_Stream]:
        # The program goes through the standard input, since the words of a command end up in a URL.
        words = ["python3", "-c", _START, str(len(self._program))]
        process = subprocess.Popen(
            self._kubectl.command("exec", "--stdin", self._pod, "--", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            yield _Stream(process, self._program + json.dumps(request).encode() + b"\n")
        finally:
            process.kill()
            process.communicate()


def _parse_files(entries: Any) -> dict[str, list[int]]:
    """Return size and time of each file in the answer of a pod, by name.

    Raises UsageError if no directory can contain these files, or if one of them would replace the
    record of the copy.
    """
    files: dict[str, list[int]] = {}
    try:
        for name, size, mtime_ns in entries:
            if not _is_relative(name):
                raise UsageError(
                    f"the pod names a file {units.shorten_text(repr(name))}, which is not a "
                    "relative path"
                )
            if type(size) is not int or size < 0 or type(mtime_ns) is not int or name in files:
                raise ValueError
            files[name] = [size, mtime_ns]
    except (TypeError, ValueError):
        raise UsageError("the pod sends a list of files that is not valid") from None
    for name in files:
        if inside := next((str(p) for p in PurePosixPath(name).parents if str(p) in files), ""):
            raise UsageError(f"the pod names both a file {inside!r} and a file {name!r} inside it")
        if name.partition("/")[0] == RECORD:
            raise UsageError(
                f"the directory on the volume contains {name}, but each copy has its record in "
                f"{RECORD}",
                hint="rename it on the volume (`launch/kubernetes.py shell` opens a shell there)",
            )
    return files


def _is_relative(name: Any) -> bool:
    """Return whether a value is the relative path of a file that can exist on this machine."""
    if not isinstance(name, str) or "\0" in name or {"", ".", ".."} & {*name.split("/")}:
        return False
    try:
        path = os.fsencode(name)
    except UnicodeEncodeError:  # a surrogate that stands for no byte
        return False
    return len(path) <= _LONGEST_PATH and max(map(len, path.split(b"/"))) <= _LONGEST_NAME


class _Stream:
    """The output of a process; reading raises Interrupted if the process dies or hangs."""

    def __init__(self, process: subprocess.Popen[bytes], request: bytes) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._output = process.stdout.fileno()
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._output, selectors.EVENT_READ)
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except BrokenPipeError:
            raise self._make_error() from None

    def read_line(self) -> bytes:
        """Return the next line that is not empty, without its end."""
        while True:
            while b"\n" not in self._buffer:
                self._buffer += self._receive()
            line, _, self._buffer = self._buffer.partition(b"\n")
            if line:
                return line

    def read_object(self) -> dict[str, Any]:
        """Return the JSON object in the next line."""
        line = self.read_line()
        try:
            content = records.parse_json(line)
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise Interrupted(f"the pod sends {line[:80]!r} instead of a JSON object")
        return content

    def read_some(self, most: int) -> bytes:
        """Return at least one byte, and at most `most`."""
        data = self._buffer or self._receive()
        self._buffer = data[most:]
        return data[:most]

    def _receive(self) -> bytes:
        if not self._selector.select(_SILENT_S):
            raise Interrupted(f"the pod has sent nothing for {_SILENT_S:.0f} s")
        if not (data := os.read(self._output, _CHUNK)):
            raise self._make_error()
        return data

    def _make_error(self) -> StageError:
        try:
            text = self._process.communicate(timeout=10)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            text = ""
        error = KubectlError(["exec"], text)
        if error.is_forbidden or error.is_missing:
            return error
        return Interrupted(f"the connection to the pod was lost: {error.last_line or 'no reason'}")


class Copy:
    """A copy of a directory on the volume. target: its name on this machine."""

    def __init__(self, source: Source, target: Path, origin: str) -> None:
        self.target = target.absolute()
        self._source = source
        self._origin = origin
        suffix = hashing.fingerprint([origin, source.path])[:8]
        self._partial = self.target.with_name(f"{self.target.name}.partial-{suffix}")
        self._content = self._partial / "content"
        self._digests: dict[str, str] = {}
        self._damaged: set[str] = set()
        self._received = 0
        self._printed = time.monotonic()

    def run(self, overwrite: bool) -> None:
        """Copy all files, continuing after lost connections, and publish the copy.

        Raises UsageError if another process copies there, or if the target exists.
        """
        began = time.monotonic()
        files = self._source.list_files()
        total = sum(size for size, _ in files.values())
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir(exist_ok=True)
        descriptor = lease.lock_path(self._partial)
        if descriptor < 0:
            raise UsageError(f"another process is copying to {self.target}")
        try:
            partial_dirs.claim_directory(self._partial)
            self._restore()
            require_new(self.target, overwrite)
            self._content.mkdir(exist_ok=True)
            self._delete_outdated(files)
            remaining_bytes = total - sum(self._get_size(name) for name in files)
            publish.require_space(self.target.parent, remaining_bytes, "the copy")
            log.info(
                f"{self._source.path}: {units.counted(len(files), 'file')}, {units.size(total)}"
                + (
                    f", {units.size(total - remaining_bytes)} of them received earlier"
                    if remaining_bytes < total
                    else ""
                )
            )
            self._receive_all(files, total)
            self._require_unchanged(files)
            self._publish(overwrite)
        finally:
            os.close(descriptor)
        seconds = time.monotonic() - began
        log.info(
            f"{self.target}: {units.counted(len(files), 'file')}, {units.size(total)}, with the "
            f"SHA-256 of the files on the volume; {units.duration(seconds)}"
        )

    def _require_unchanged(self, files: dict[str, list[int]]) -> None:
        if self._source.list_files() != files:
            raise UsageError(
                f"{self._source.path} changed while it was copied",
                hint="run the same command again when nothing writes there",
            )

    def _get_size(self, name: str) -> int:
        path = self._content / name
        return path.stat().st_size if path.is_file() else 0

    def _delete_outdated(self, files: dict[str, list[int]]) -> None:
        """Delete the copies of files that have changed since an earlier fetch."""
        state = self._partial / "files.json"
        known = records.read_mapping(state)
        if partial_dirs.has_links(self._content):
            partial_dirs.delete_tree(self._content)
            self._content.mkdir()
        for path in [path for path in self._content.rglob("*") if path.is_file()]:
            name = path.relative_to(self._content).as_posix()
            if known.get(name) != files.get(name):
                path.unlink()
        for folder, _, _ in os.walk(self._content, topdown=False):
            if folder != str(self._content) and not any(Path(folder).iterdir()):
                Path(folder).rmdir()  # a file may have its name now
        manifest.write_json(state, files)

    def _receive_all(self, files: dict[str, list[int]], total: int) -> None:
        failures = 0
        while len(self._digests) < len(files):
            before = self._received
            try:
                self._receive(files, total)
            except Interrupted as error:
                failures = 1 if self._received > before else failures + 1
                if failures >= _ATTEMPTS:
                    raise
                pause = backoff(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S)
                log.warn(f"{error.problem}; continuing in {units.duration(pause)}")
                time.sleep(pause)
                self._require_unchanged(files)

    def _receive(self, files: dict[str, list[int]], total: int) -> None:
        """Receive the files that are missing, over one connection."""
        requests = [
            (name, min(self._get_size(name), size))
            for name, (size, _) in files.items()
            if name not in self._digests
        ]
        with self._source.send(requests) as stream:
            for name, start in requests:
                header = stream.read_object()
                if header != {"name": name, "start": start}:
                    raise Interrupted(f"the pod sends {header} instead of {name}")
                path = self._content / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with HashedFile(path, "sha256", keep=start) as file:
                    while (remaining_bytes := files[name][0] - file.bytes) > 0:
                        self._received += file.write(stream.read_some(remaining_bytes))
                        self._print_progress(files, total)
                    file.sync()
                digest = stream.read_line().decode(errors="replace")
                if file.digest() != f"sha256:{digest}":
                    self._discard(name)
                self._digests[name] = file.digest()

    def _discard(self, name: str) -> None:
        """Delete a damaged file, to receive it again. Raises ArtifactError the second time."""
        (self._content / name).unlink()
        if name in self._damaged:
            raise ArtifactError(
                f"{name} arrived twice with another SHA-256 than it has on the volume",
                hint="a network, a disk or the memory of a machine damages data",
            )
        self._damaged.add(name)
        raise Interrupted(f"{name} arrived with another SHA-256")

    def _print_progress(self, files: dict[str, list[int]], total: int) -> None:
        if time.monotonic() - self._printed > _LINE_EVERY_S:
            self._printed = time.monotonic()
            log.info(
                f"  {units.size(sum(map(self._get_size, files)))} of {units.size(total)}, "
                f"{len(self._digests)} of {len(files)} files"
            )

    def _restore(self) -> None:
        """Restore the previous copy if an earlier fetch ended between two renames."""
        replaced = self._partial / "replaced"
        if replaced.is_dir() and not self.target.exists():
            replaced.replace(self.target)
        partial_dirs.delete_tree(replaced)

    def _publish(self, overwrite: bool) -> None:
        """Give the copy its name, and delete the previous one."""
        manifest.write_json(
            self._content / RECORD,
            {"kind": _KIND, "origin": self._origin, "path": self._source.path}
            | {"files": self._digests},
        )
        for folder, _, _ in os.walk(self._content):
            publish.fsync(Path(folder))
        require_new(self.target, overwrite)  # another process may have created it meanwhile
        if self.target.exists():
            self.target.replace(self._partial / "replaced")
        self._content.replace(self.target)
        publish.fsync(self.target.parent)
        partial_dirs.delete_marked(self._partial)
