"""Read and write the files below a directory, or below a prefix in a bucket, through fsspec.

Only this module and client.py open network connections.

The package of the bucket's service (s3fs for S3) finds credentials, region and endpoint as all
tools of that service do. This module neither reads nor stores them. A file counts as written only
after the place has confirmed its content: S3 reports the MD5 of what it has stored; otherwise the
file is read back.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, manifest, publish, units
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.hub.repository import redact_urls

# The package of each kind of bucket. Only s3 has been tested.
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
_PINNED = "s3fs"  # in requirements-optional.txt
_URL = re.compile(
    rf"(?P<kind>{'|'.join(_PACKAGES)})://"
    r"(?P<root>(?P<bucket>[a-z0-9][a-z0-9._-]{1,61}[a-z0-9])(/[\w.=+-]+)*)/?"
)
_PART = 16 << 20  # bytes; an upload to S3 holds _PARALLEL parts in memory
_MOST_PARTS = 10_000  # of an object, a limit of S3
_PARALLEL = 4  # parts of one file in flight at a time
_MAX_ERROR_LENGTH = 300
# Errors that a person must fix. All other errors may be temporary.
_REFUSALS = {errno.EINVAL, errno.EPERM, errno.EREMCHG}
_REFUSAL_NAME = re.compile("Credential|Authenti|Profile|ParamValidation|SSO|TokenRetrieval")


def is_url(text: str) -> bool:
    """Return whether a text names a bucket and a prefix, such as `s3://BUCKET/PREFIX`."""
    return _URL.fullmatch(text) is not None


def find_package(target: str) -> str:
    """Return the package that a directory or URL needs; empty for a directory."""
    parts = _URL.fullmatch(target)
    return _PACKAGES[parts["kind"]] if parts else ""


def install_command(package: str) -> str:
    """Return the command that installs the package of a kind of bucket."""
    if package == _PINNED:
        return commands.pip_install_optional(package)
    import fsspec

    return commands.pip_install(package, f"fsspec=={fsspec.__version__}")


class Folder:
    """The files of a directory or below a prefix; names are given without it.

    Errors of a directory are those of the disk. For a bucket, raises UsageError for an error that a
    person must fix, such as wrong credentials; StageError for all other errors of the service and
    of the network. Any thread may call the methods.
    """

    def __init__(self, target: str, name: str = "") -> None:
        """target: a directory, or a URL for which `is_url` is true. name: a folder in it."""
        parts = _URL.fullmatch(target)
        self._kind = parts["kind"] if parts else "file"
        self.directory = None if parts else Path(target, name).absolute()
        self.where = _join_path(target.rstrip("/"), name) if parts else str(Path(target, name))
        self._root = _join_path(parts["root"], name) if parts else str(self.directory)
        self._fs: Any = None
        with self._translate_errors():
            self._fs = _open_file_system(self._kind, self.where)

    def list_names(self, folder: str = "") -> list[str]:
        """Return the names of all files in a folder and below, sorted."""
        with self._translate_errors():
            find = _find_files if self.directory else self._fs.find
            paths = find(self._path(folder))
        return sorted(path[len(self._root) + 1 :] for path in paths)

    def list_folders(self) -> list[str]:
        """Return the names of the folders and files at the top."""
        with self._translate_errors():
            try:
                paths = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                self._find_reason()
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in pieces; raise FileNotFoundError if there is none."""
        with (
            self._translate_errors(),
            self._fs.open(self._path(name), "rb", cache_type="none") as file,
        ):
            while chunk := file.read(_PART):
                yield chunk

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which is complete or does not exist."""
        if self.directory:
            path = self.directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if content:
                manifest.write_bytes(path, content)
            else:  # as a mark must: after a kill, its directory contains it or is empty
                path.write_bytes(content)
            for parent in path.parents[: name.count("/") + 1]:
                publish.fsync(parent)
            return
        with self._translate_errors():
            self._fs.pipe_file(self._path(name), content)
        if b"".join(self.read(name)) != content:
            raise self._make_damage(name)

    def upload(self, name: str, path: Path, size: int, digest: str) -> None:
        """Write a file of this machine, and verify what was written. digest: as in the manifest.

        Raises ArtifactError if the file does not match its size and digest; FileNotFoundError if it
        is gone. A damaged file may exist afterwards.
        """
        part = max(_PART, units.ceil_div(size, _MOST_PARTS))
        options = {"chunksize": part} if self._kind == "s3" else {}
        etag = _read_etag(path, size, digest, part) if self._kind == "s3" else ""
        if self.directory:
            (self.directory / name).parent.mkdir(parents=True, exist_ok=True)
        with self._translate_errors(path):
            self._fs.put_file(str(path), self._path(name), **options)
            if self.directory:
                _settle(self.directory / name)
            elif etag and self._fs.info(self._path(name)).get("ETag", "").strip('"') == etag:
                return
        hasher = hashing.new_hasher(digest.partition(":")[0])
        for chunk in self.read(name):
            hasher.update(chunk)
        if hashing.format_digest(hasher, digest.partition(":")[0]) != digest:
            _require_same(path, digest)
            raise self._make_damage(name)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files, one after the other. A name without a file is no error."""
        for name in names:
            with suppress(FileNotFoundError), self._translate_errors():
                self._fs.rm_file(self._path(name))
                if self.directory:
                    publish.fsync((self.directory / name).parent)

    def abort_uploads(self, folder: str) -> None:
        """Discard the parts that killed uploads left in S3, for the files of a folder.

        S3 keeps them, and charges for them, until then. Errors are ignored: not all servers and
        permissions allow it, and the parts do no harm.
        """
        if self._kind != "s3":
            return
        bucket, _, prefix = self._path(folder).partition("/")
        with suppress(StageError, FileNotFoundError), self._translate_errors():
            answer = self._fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{prefix}/")
            for upload in answer.get("Uploads", ()):
                self._fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])

    def _path(self, name: str) -> str:
        return _join_path(self._root, name)

    def _find_reason(self) -> None:
        """Raise an error if a file is missing or refused because its bucket is.

        Only the answer to a listing names the reason.
        """
        if self.directory:
            return
        try:
            self._fs.find(self._root)
        except Exception as error:
            must_be_fixed = isinstance(error, (FileNotFoundError, PermissionError))
            kind = UsageError if must_be_fixed else StageError
            name = self._find_local_file(error)
            subject = f"{self.where}: {name}" if name else self.where
            raise kind(f"{subject}: {_summarize_error(error)}") from error

    def _find_local_file(self, error: Exception) -> str | None:
        """Return the file of this machine that an error is about, None for other errors."""
        if not isinstance(error, OSError) or error.filename is None:
            return None
        name = os.fsdecode(error.filename)
        return None if name.lstrip("/").startswith(self._root) else name

    def _make_damage(self, name: str) -> StageError:
        return StageError(f"the copy {self.where}/{name} differs from what was written")

    @contextmanager
    def _translate_errors(self, source: Path | None = None) -> Iterator[None]:
        """Raise the errors that the class promises. source: a file of this machine to upload."""
        try:
            yield
        except Exception as error:
            if self.directory or isinstance(error, StageError):
                raise
            if (name := self._find_local_file(error)) is not None:
                if source and Path(name) == source:
                    raise
                # Such as a file with credentials: no object is missing.
                raise UsageError(f"{self.where}: {name}: {_summarize_error(error)}") from error
            if isinstance(error, (FileNotFoundError, PermissionError)) and self._fs:
                self._find_reason()
            if isinstance(error, FileNotFoundError) and self._fs:
                raise
            must_be_fixed = (
                isinstance(error, PermissionError)
                or getattr(error, "errno", None) in _REFUSALS
                or _REFUSAL_NAME.search(type(error).__name__)
            )
            kind = UsageError if must_be_fixed else StageError
            raise kind(f"{self.where}: {_summarize_error(error)}") from error


def _join_path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if name else folder


def _find_files(directory: str) -> list[str]:
    """Return the paths of all files in a directory, if it exists, and below.

    fsspec's own `find` omits directories that cannot be read.
    """

    def refuse_directory(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError):
            raise error

    return [
        f"{folder}/{name}"
        for folder, _, names in os.walk(directory, onerror=refuse_directory)
        for name in names
    ]


def _open_file_system(kind: str, where: str) -> Any:
    """Return the file system of fsspec, which remembers neither listings nor earlier ones."""
    import fsspec

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if kind == "s3":
        # Servers other than AWS rarely resolve BUCKET.HOST, nor know the checksums of new clients.
        is_other = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        config = {
            "connect_timeout": 10,
            "read_timeout": 60,
            "retries": {"mode": "standard", "max_attempts": 2},
            "request_checksum_calculation": "when_required",
            "response_checksum_validation": "when_required",
            "s3": {"addressing_style": "path"} if is_other else None,
        }
        options |= {"config_kwargs": config, "max_concurrency": _PARALLEL}
    for name in ("botocore", "aiobotocore", "s3fs"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # errors are raised
    try:
        file_system = fsspec.filesystem(kind, **options)
    except ImportError as error:
        package = _PACKAGES[kind]
        raise UsageError(
            f"{where} needs the package {package}, which is not installed",
            found=str(error),
            run=install_command(package),
        ) from error
    if kind == "s3":
        file_system.retries = 2  # each with the retries above; also if a body breaks off
        file_system.connect()
    return file_system


def _read_etag(path: Path, size: int, digest: str, part: int) -> str:
    """Return the ETag that S3 reports for an upload of a file, unless it encrypts with own keys.

    It is the MD5 of the content, or of the MD5 of its parts. Raises ArtifactError if the file does
    not match its size and digest.
    """
    hasher = hashing.new_hasher(digest.partition(":")[0])
    is_whole = size < 2 * part
    sums = []
    with path.open("rb") as file:
        while content := file.read(2 * part if is_whole else part):
            hasher.update(content)
            sums.append(hashlib.md5(content, usedforsecurity=False))
        bytes_read = file.tell()
    if (bytes_read, hashing.format_digest(hasher, digest.partition(":")[0])) != (size, digest):
        raise _make_change(path)
    if is_whole:
        return (sums or [hashlib.md5(usedforsecurity=False)])[0].hexdigest()
    of_parts = hashlib.md5(b"".join(part.digest() for part in sums), usedforsecurity=False)
    return f"{of_parts.hexdigest()}-{len(sums)}"


def _require_same(path: Path, digest: str) -> None:
    """Raise ArtifactError if a file has another digest."""
    if hashing.file_digest(path, digest.partition(":")[0]) != digest:
        raise _make_change(path)


def _make_change(path: Path) -> ArtifactError:
    return ArtifactError(f"{path} has other content than when it was saved")


def _settle(path: Path) -> None:
    """Make a file durable, and drop it from the page cache, so that it is read from the disk."""
    with path.open("rb", buffering=0) as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    publish.fsync(path.parent)


def _summarize_error(error: Exception) -> str:
    """Return an error as one line without passwords."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return redact_urls(" ".join(text.split()))[:_MAX_ERROR_LENGTH]
