# covers: lib/core/hashing.py
"""Digests with known values, of hashed files, and without xxhash."""

from __future__ import annotations

import os
from array import array
from pathlib import Path

import pytest

from lib.core import hashing
from lib.core.errors import ArtifactError

ABC = {
    "sha256": "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
    "xxh3": "xxh3:06b05ab6733a618578af5f94892f3950",
}


@pytest.mark.parametrize("algorithm", ABC)
def test_known_digests(tmp_path: Path, algorithm: str) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert hashing.bytes_digest(b"abc", algorithm) == ABC[algorithm]
    assert hashing.file_digest(tmp_path / "f", algorithm) == ABC[algorithm]
    assert hashing.has_digest(tmp_path / "f", ABC[algorithm])
    assert not hashing.has_digest(tmp_path / "f", ABC[algorithm].replace("0", "1"))


def test_a_file_of_many_pieces_has_the_digest_of_its_bytes(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 1000)
    data = bytes(range(256)) * 100
    (tmp_path / "f").write_bytes(data)
    assert hashing.file_digest(tmp_path / "f") == hashing.bytes_digest(data)


@pytest.mark.parametrize("buffering", [-1, 0])
def test_a_continued_hashed_file_has_the_digest_of_its_bytes(
    tmp_path: Path, buffering: int
) -> None:
    path = tmp_path / "f"
    with hashing.HashedFile(path, buffering=buffering) as file:
        for data in (b"abc", bytearray(b"de"), memoryview(b""), array("H", [258, 772])):
            assert file.write(data) == memoryview(data).nbytes
        assert file.tell() == file.bytes == 9
        os.fsync(file.fileno())
        assert path.stat().st_size == 9
    assert file.digest() == hashing.file_digest(path)
    with hashing.HashedFile(path, "sha256", keep=3, buffering=buffering) as file:
        file.write(b"def")
        file.sync()
    assert path.read_bytes() == b"abcdef" and file.bytes == 6
    assert file.digest() == hashing.bytes_digest(b"abcdef", "sha256")


def test_an_unknown_algorithm_is_an_error() -> None:
    with pytest.raises(ArtifactError, match="md5"):
        hashing.new_hasher("md5")


def test_fingerprint_ignores_the_order_of_keys_only() -> None:
    assert hashing.fingerprint({"a": 1, "b": [1, 2]}) == hashing.fingerprint({"b": [1, 2], "a": 1})
    assert hashing.fingerprint([1, 2]) != hashing.fingerprint([2, 1])
    assert hashing.fingerprint({"a": Path("x")}) == hashing.fingerprint({"a": "x"})
    assert hashing.fingerprint({}) == "44136fa355b3678a"  # existing artifacts contain it


def test_without_xxhash_manifests_hold_sha256(python, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    done = python(
        """
import sys
from pathlib import Path
sys.modules["xxhash"] = None  # makes `import xxhash` fail
from lib.core import hashing
from lib.core.errors import ArtifactError
print(hashing.file_digest(Path("f")), hashing.has_digest(Path("f"), sys.argv[1]))
try:
    hashing.has_digest(Path("f"), sys.argv[2])
except ArtifactError as error:
    print(error.render())
""",
        ABC["sha256"],
        ABC["xxh3"],
    )
    assert done.stdout.startswith(f"{ABC['sha256']} True\n")
    assert "pip install xxhash" in done.stdout
