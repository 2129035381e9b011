"""Compute content digests, written as `algorithm:hex` so that a manifest names its algorithm.

xxh3 detects damage at the speed of the disk. sha256 protects files that will be unpickled or that
cross an air gap.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from lib.core import commands
from lib.core.errors import ArtifactError


class Hasher(Protocol):
    """Declares the methods that hashers of hashlib and xxhash share."""

    def update(self, data: bytes) -> None: ...
    def hexdigest(self) -> str: ...


_ALGORITHMS: dict[str, Callable[[], Hasher]] = {"sha256": hashlib.sha256}
with suppress(ImportError):  # without it manifests use sha256: slower, never weaker
    import xxhash

    _ALGORITHMS["xxh3"] = xxhash.xxh3_128

FAST = [*_ALGORITHMS][-1]
_CHUNK = 1 << 22
_SEAL = "digest"  # the key of the digest in a sealed record


def new_hasher(algorithm: str = FAST) -> Hasher:
    """Return a hasher for `xxh3` (128 bits) or `sha256`. Raises ArtifactError if unavailable."""
    if algorithm in _ALGORITHMS:
        return _ALGORITHMS[algorithm]()
    raise ArtifactError(
        f"cannot check a digest of kind {algorithm!r} here",
        run=commands.pip_install("xxhash") if algorithm == "xxh3" else "",
    )


def format_digest(hasher: Hasher, algorithm: str = FAST) -> str:
    """Return the digest string of the bytes that a hasher has read."""
    return f"{algorithm}:{hasher.hexdigest()}"


def file_digest(
    path: Path, algorithm: str = FAST, advance: Callable[[int], None] = lambda size: None
) -> str:
    """Return the digest string of a file's content, read in pieces of 4 MiB.

    advance: called with the number of bytes of each piece.
    """
    hasher = new_hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            advance(len(chunk))
    return format_digest(hasher, algorithm)


class HashedFile(io.RawIOBase):
    """Writes a file from its beginning to its end, and hashes the bytes.

    So the file need not be read again for its digest. bytes: size so far, including `keep`.
    """

    def __init__(
        self, path: Path, algorithm: str = FAST, keep: int = 0, buffering: int = -1
    ) -> None:
        """Create a file, or continue an existing one after its first `keep` bytes.

        The kept bytes are hashed first, and any bytes after them are cut off. buffering: as for
        `open`; 0 writes at once, so that a child process inherits no unwritten bytes.
        """
        super().__init__()
        self.path = path
        self.bytes = keep
        self._algorithm = algorithm
        self._hasher = new_hasher(algorithm)
        self._file: Any = path.open("r+b" if keep else "wb", buffering)
        if keep:
            self._file.truncate(keep)
            while chunk := self._file.read(_CHUNK):
                self._hasher.update(chunk)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Append all bytes of a contiguous buffer, and return their number."""
        size = memoryview(data).nbytes
        if size:
            self._hasher.update(data)
            view = memoryview(data).cast("B")
            while view:  # an unbuffered write may be partial
                view = view[self._file.write(view) :]
            self.bytes += size
        return size

    def tell(self) -> int:
        """Return the number of bytes so far."""
        return self.bytes

    def fileno(self) -> int:
        """Flush the buffer to the operating system and return the file descriptor."""
        self._file.flush()
        return self._file.fileno()

    def sync(self) -> None:
        """Flush the file to disk."""
        os.fsync(self.fileno())

    def digest(self) -> str:
        """Return the digest string of the bytes so far."""
        return format_digest(self._hasher, self._algorithm)

    def close(self) -> None:
        """Close the file; its digest remains available."""
        if not self.closed:
            self._file.close()
            super().close()


def bytes_digest(data: bytes, algorithm: str = FAST) -> str:
    """Return the digest string of a byte string."""
    hasher = new_hasher(algorithm)
    hasher.update(data)
    return format_digest(hasher, algorithm)


def ends_digest(path: Path, size: int, algorithm: str = FAST) -> str:
    """Return the digest string of the first and the last `size` bytes of a file."""
    with path.open("rb") as file:
        head = file.read(size)
        file.seek(max(0, path.stat().st_size - size))
        return bytes_digest(head + file.read(), algorithm)


def has_digest(
    path: Path, expected: str, advance: Callable[[int], None] = lambda size: None
) -> bool:
    """Return whether a file's content has the digest string from a manifest."""
    return file_digest(path, expected.partition(":")[0], advance) == expected


def fingerprint(value: Any) -> str:
    """Return 16 hex digits that identify a JSON-like value, whatever the order of its keys."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def seal_record(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return a record as values for JSON, with a digest of its content."""
    plain = json.loads(json.dumps(content))
    return plain | {_SEAL: fingerprint(plain)}


def open_record(record: Any) -> dict[str, Any]:
    """Return the content of a record of `seal_record`. Raises ValueError if it is damaged.

    Records of earlier versions, which have no digest, are accepted.
    """
    if not isinstance(record, dict):
        raise ValueError("it contains no record")
    content = {key: value for key, value in record.items() if key != _SEAL}
    if record.get(_SEAL, "") not in ("", fingerprint(content)):
        raise ValueError("its content does not match the recorded digest")
    return content
