# covers: lib/hub/s3.py
"""Objects of a bucket, against a server on this machine.

If S3_TEST_ENDPOINT is the address of another server with an empty bucket named `bucket`, such as
that of moto, the tests that need no faults use it instead.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lib.core import hashing
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.hub import s3
from lib.hub.s3 import Bucket
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
def bucket(server: S3Server) -> Bucket:
    return Bucket(URL, "a run-18")


def write_file(path: Path, size: int) -> tuple[Path, int, str]:
    path.write_bytes(os.urandom(size))
    return path, size, hashing.file_digest(path)


@pytest.mark.parametrize(
    ("text", "is_url"),
    [
        ("s3://bucket", True),
        ("s3://bucket/", True),
        ("s3://my.bucket-1/a/b_c", True),
        ("s3://bucket//a", False),
        ("s3://key:secret@bucket/a", False),
        ("s3://Bucket", False),
        ("s3:/bucket", False),
        ("s3://b", False),
        ("gs://bucket", False),
        ("directory", False),
    ],
)
def test_a_url_names_a_bucket(text: str, is_url: bool) -> None:
    assert s3.is_url(text) == is_url


@pytest.mark.parametrize("size", [0, 5, 1 << 20])
def test_a_small_file_becomes_an_object(bucket: Bucket, tmp_path: Path, size: int) -> None:
    path, *facts = write_file(tmp_path / "file", size)
    bucket.upload("folder/file", path, *facts)
    assert b"".join(bucket.read("folder/file")) == path.read_bytes()
    bucket.delete(["folder/file", "no such object"])
    with pytest.raises(FileNotFoundError):
        b"".join(bucket.read("folder/file"))


@pytest.mark.parametrize("size", [5 << 20, (23 << 20) + 7])
def test_a_large_file_is_uploaded_in_parts(
    bucket: Bucket, tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PART", 5 << 20)  # the least that S3 allows
    path, *facts = write_file(tmp_path / "file", size)
    bucket.upload("file", path, *facts)
    assert b"".join(bucket.read("file")) == path.read_bytes()
    bucket.delete(["file"])


def test_names_are_listed_page_by_page(bucket: Bucket) -> None:
    names = [f"folder/{number}" for number in range(8)] + ["other", "ä name & more"]
    for name in names:
        bucket.write(name, b"x")
    assert bucket.list_names() == sorted(names)
    assert bucket.list_names("folder/") == names[:8]
    assert Bucket(URL).list_folders("a run-") == ["a run-18"]
    bucket.delete(names)
    assert bucket.list_names() == []


def test_a_file_with_other_content_makes_no_object(
    bucket: Bucket, server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_PART", 5 << 20)
    for size in (100, 11 << 20):
        path, _, digest = write_file(tmp_path / "file", size)
        with path.open("r+b") as file:
            file.write(bytes([path.read_bytes()[0] ^ 1]))
        with pytest.raises(ArtifactError, match="has other content"):
            bucket.upload("file", path, size, digest)
        with pytest.raises(ArtifactError, match="has other content"):
            bucket.upload("file", path, size + 1, hashing.file_digest(path))
    assert bucket.list_names() == [] and not server.store.uploads


@needs_faults
@pytest.mark.parametrize("keeps_checksums", [True, False])
def test_a_damaged_object_is_noticed(
    bucket: Bucket,
    server: S3Server,
    tmp_path: Path,
    keeps_checksums: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(s3, "_PART", 5 << 20)
    server.store.keeps_checksums = keeps_checksums
    for size in (100, 11 << 20):
        path, *facts = write_file(tmp_path / "file", size)
        server.store.corrupts = "bad"
        bucket.upload("good", path, *facts)
        with pytest.raises(StageError, match="has other content"):
            bucket.upload("bad", path, *facts)


@needs_faults
def test_parts_of_killed_uploads_are_discarded(bucket: Bucket, server: S3Server) -> None:
    server.store.uploads = {
        "ours": ("some/prefix/a run-18/checkpoints/x", {}),
        "other": ("some/prefix/other", {}),
    }
    bucket.abort_uploads("checkpoints/")
    assert [*server.store.uploads] == ["other"]


@pytest.mark.slow
@needs_faults
def test_errors_say_whether_a_person_must_act(
    server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"s3://other/x: .*bucket does not exist"):
        Bucket("s3://other/x").list_names()
    server.store.status = 503
    with pytest.raises(StageError, match="reduce your request rate") as busy:
        Bucket(URL).write("a", b"")
    assert not isinstance(busy.value, UsageError)
    assert len(server.store.requests) > 4, "it was tried several times"
    server.store.status = 0
    server.stop()
    with pytest.raises(StageError, match="Could not connect") as refused:
        Bucket(URL).list_names()
    assert not isinstance(refused.value, UsageError)
    server.start()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "wrong-key")
    with pytest.raises(UsageError, match="Access Key Id does not exist") as wrong:
        Bucket(URL).list_names()
    assert "wrong-key" not in wrong.value.render() and "secret" not in wrong.value.render()
    monkeypatch.setenv("AWS_PROFILE", "no-such-profile")
    with pytest.raises(UsageError, match="no-such-profile"):
        Bucket(URL)
    monkeypatch.delenv("AWS_PROFILE")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(UsageError, match="Unable to locate credentials"):
        Bucket(URL).list_names()


def test_without_boto3_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(UsageError, match="needs the package boto3") as caught:
        Bucket(URL)
    assert "boto3==" in caught.value.run


MEASURE = """
import resource, sys
from pathlib import Path
from lib.core import hashing
from lib.hub.s3 import Bucket
path = Path(sys.argv[1])
bucket = Bucket(sys.argv[2])
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
    """A client with parts of 16 MiB, five of them in memory and copied once more by the library."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(300 << 20)
    (tmp_path / "small").write_bytes(b"x")
    command = [sys.executable, "-c", MEASURE, path, URL, tmp_path / "small"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200
