# covers: lib/hub/folder.py
"""Files below a directory and below a prefix in a bucket, against a server on this machine.

If S3_TEST_ENDPOINT is the address of another server with an empty bucket named `bucket`, such as
that of moto, the tests that need no faults use it instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from lib.core import hashing
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.hub import folder
from lib.hub.folder import Folder
from tests.conftest import ROOT
from tests.s3_server import BUCKET, S3Server, serve_s3

URL = f"s3://{BUCKET}/some/prefix"
_OTHER_SERVER = os.environ.get("S3_TEST_ENDPOINT", "")
needs_faults = pytest.mark.skipif(bool(_OTHER_SERVER), reason="needs the faults of our own server")


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with serve_s3() as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        if _OTHER_SERVER:
            monkeypatch.setenv("AWS_ENDPOINT_URL", _OTHER_SERVER)
        yield server


@pytest.fixture
def bucket(server: S3Server) -> Folder:
    return Folder(URL, "a run-18")


@pytest.fixture(params=["directory", "bucket"])
def place(request: pytest.FixtureRequest, server: S3Server, tmp_path: Path) -> Folder:
    target = URL if request.param == "bucket" else str(tmp_path / "second")
    return Folder(target, "a [run]-18")


def write_file(path: Path, size: int) -> tuple[Path, int, str]:
    path.write_bytes(os.urandom(size))
    return path, size, hashing.file_digest(path)


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("s3://bucket", "s3fs"),
        ("s3://bucket/", "s3fs"),
        ("s3://my.bucket-1/a/b_c", "s3fs"),
        ("gs://bucket/a", "gcsfs"),
        ("az://bucket/a", "adlfs"),
        ("s3://bucket//a", ""),
        ("s3://key:secret@bucket/a", ""),
        ("s3://Bucket", ""),
        ("s3:/bucket", ""),
        ("s3://b", ""),
        ("ssh://bucket", ""),
        ("directory", ""),
    ],
)
def test_a_url_names_a_bucket(text: str, package: str) -> None:
    assert folder.find_package(text) == package
    assert folder.is_url(text) == bool(package)


@pytest.mark.parametrize("size", [0, 5, 1 << 20])
def test_a_file_is_written_read_and_deleted(place: Folder, tmp_path: Path, size: int) -> None:
    path, *facts = write_file(tmp_path / "file", size)
    place.upload("folder/file", path, *facts)
    assert b"".join(place.read("folder/file")) == path.read_bytes()
    place.delete(["folder/file", "no such file"])
    with pytest.raises(FileNotFoundError):
        b"".join(place.read("folder/file"))


@pytest.mark.parametrize("size", [5 << 20, (23 << 20) + 7])
def test_a_large_file_is_uploaded_in_parts(
    bucket: Folder, server: S3Server, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PART", 5 << 20)  # the least that S3 allows
    path, *facts = write_file(tmp_path / "file", size)
    bucket.upload("file", path, *facts)
    assert "GET" not in [method for method, _ in server.store.requests], "S3 has confirmed it"
    assert b"".join(bucket.read("file")) == path.read_bytes()
    bucket.delete(["file"])


def test_names_are_listed_page_by_page(place: Folder) -> None:
    names = [f"folder/{number}" for number in range(8)] + ["other", "ä name & more"]
    for name in names:
        place.write(name, b"x")
    assert place.list_names() == sorted(names)
    assert place.list_names("folder") == names[:8]
    assert sorted(place.list_folders()) == ["folder", "other", "ä name & more"]
    place.delete(names)
    assert place.list_names() == place.list_names("folder") == []


@needs_faults
@pytest.mark.parametrize("kind", ["token", "process"])
def test_missing_credentials_are_no_missing_file(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Otherwise a place with copies would seem to be empty."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    missing = tmp_path / "missing"
    if kind == "token":
        monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(missing))
        monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/name")
    else:
        config = tmp_path / "config"
        config.write_text(f"[default]\ncredential_process = {missing}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    with pytest.raises(UsageError, match=str(missing)):
        b"".join(Folder(URL, "a run-18").read("COPIES.json"))
    with pytest.raises(UsageError, match=str(missing)):
        Folder(URL).list_folders()


def test_a_file_with_other_content_is_refused(
    place: Folder, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "_PART", 5 << 20)
    for size in (100, 11 << 20):
        path, _, digest = write_file(tmp_path / "file", size)
        with path.open("r+b") as file:
            file.write(bytes([path.read_bytes()[0] ^ 1]))
        with pytest.raises(ArtifactError, match="has other content"):
            place.upload("file", path, size, digest)
    assert not server.store.uploads and not server.store.objects
    with pytest.raises(FileNotFoundError):
        place.upload("file", tmp_path / "missing", 5, digest)


@needs_faults
@pytest.mark.parametrize("has_own_keys", [False, True])
def test_a_damaged_object_is_noticed(
    bucket: Folder,
    server: S3Server,
    tmp_path: Path,
    has_own_keys: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By its ETag, or by its content if the ETag says nothing about that."""
    monkeypatch.setattr(folder, "_PART", 5 << 20)
    server.store.has_own_keys = has_own_keys
    server.store.corrupts = "bad"
    for size in (100, 11 << 20):
        path, *facts = write_file(tmp_path / "file", size)
        bucket.upload("good", path, *facts)
        assert ("GET" in [method for method, _ in server.store.requests]) == has_own_keys
        server.store.requests.clear()
        with pytest.raises(StageError, match="differs"):
            bucket.upload("bad", path, *facts)
        server.store.requests.clear()
    with pytest.raises(StageError, match="differs"):
        bucket.write("bad", b"small")


@needs_faults
def test_parts_of_killed_uploads_are_discarded(bucket: Folder, server: S3Server) -> None:
    server.store.uploads = {
        "ours": ("some/prefix/a run-18/checkpoints/x", {}),
        "other": ("some/prefix/other", {}),
    }
    bucket.abort_uploads("checkpoints")
    assert [*server.store.uploads] == ["other"]


@pytest.mark.slow
@needs_faults
def test_errors_say_whether_a_person_must_act(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Folder("s3://other/x")
    for act in (
        other.list_names,
        other.list_folders,
        lambda: b"".join(other.read("a")),
        lambda: other.write("a", b""),
    ):
        with pytest.raises(UsageError, match=r"s3://other/x: .*bucket"):
            act()
    server.store.status = 503
    server.store.requests.clear()
    with pytest.raises(StageError, match="reduce your request rate") as busy:
        Folder(URL).write("a", b"")
    assert not isinstance(busy.value, UsageError)
    assert len(server.store.requests) > 4, "it was tried several times"
    server.store.status = 0
    server.stop()
    with pytest.raises(StageError, match="Could not connect") as refused:
        Folder(URL).list_names()
    assert not isinstance(refused.value, UsageError)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong-key")
    with pytest.raises(UsageError, match="Access Key Id") as wrong:
        Folder(URL).list_names()
    assert "wrong-key" not in wrong.value.render() and "secret" not in wrong.value.render()
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(UsageError, match="no-such-profile"):
        Folder(URL)
    monkeypatch.delenv("AWS_PROFILE")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="Unable to locate credentials"):
        Folder(URL).list_names()


def test_without_its_package_a_place_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(kind: str, **_: object) -> None:
        raise ImportError(f"a package for {kind}")

    monkeypatch.setattr(fsspec, "filesystem", fail)
    with pytest.raises(UsageError, match="needs the package s3fs") as caught:
        Folder(URL)
    assert "s3fs==" in caught.value.run
    with pytest.raises(UsageError, match="needs the package gcsfs") as caught:
        Folder("gs://bucket")
    assert "gcsfs fsspec==" in caught.value.run, "a newer gcsfs would replace fsspec"


MEASURE = """
import resource, sys
from pathlib import Path
from lib.core import hashing
from lib.hub.folder import Folder
path = Path(sys.argv[1])
bucket = Folder(sys.argv[2])
bucket.upload("warm", Path(sys.argv[3]), 1, hashing.file_digest(Path(sys.argv[3])))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
bucket.upload("file", path, path.stat().st_size, hashing.file_digest(path))
for chunk in bucket.read("file"):
    pass
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


@needs_faults
@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(server: S3Server, tmp_path: Path) -> None:
    """A client with four parts of 16 MiB in memory, copied once more by the library."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    (tmp_path / "small").write_bytes(b"x")
    command = [sys.executable, "-c", MEASURE, path, URL, tmp_path / "small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
