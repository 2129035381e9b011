"""Read and write objects of an S3 bucket.

Only this module and client.py open network connections.

boto3 finds the credentials, the region and the endpoint (AWS_ENDPOINT_URL) as all AWS tools do.
This module neither reads nor stores them. S3 compares each part with its SHA-256 on arrival. An
upload succeeds only if the checksum that S3 reports equals the checksum of the file; if the server
reports none, the object is read back.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import logging
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import commands, hashing, units
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.hub.repository import redact_urls

_URL = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?P<prefix>(/[\w.=+-]+)*)/?")
_PART = 16 << 20  # bytes; an upload holds _PARALLEL + 1 parts in memory
_MOST_PARTS = 10_000  # of an object, a limit of S3
_PARALLEL = 4  # parts of one file in flight at a time
_DELETED_AT_ONCE = 1000  # objects, a limit of S3
_CHUNK = 1 << 22
_MAX_ERROR_LENGTH = 300
# Codes of errors that a user must fix. All other errors may be temporary.
_REFUSALS = {
    *("AccessDenied", "AllAccessDisabled", "AuthorizationHeaderMalformed", "ExpiredToken"),
    *("InvalidAccessKeyId", "InvalidBucketName", "InvalidToken", "NoSuchBucket"),
    *("PermanentRedirect", "SignatureDoesNotMatch", "301", "400", "401", "403", "404"),
}


def is_url(text: str) -> bool:
    """Return whether a text names a bucket and a prefix, `s3://BUCKET/PREFIX`."""
    return _URL.fullmatch(text) is not None


class Bucket:
    """The objects of a bucket whose names begin with a prefix; names are given without it.

    Raises UsageError if boto3 is not installed, or for an error that a user must fix, such as
    wrong credentials; StageError for all other errors of S3 and of the network. Any thread may call
    the methods.
    """

    def __init__(self, url: str, folder: str = "") -> None:
        """url: `s3://BUCKET/PREFIX`. folder: the last part of the prefix, which may be any text."""
        parts = _URL.fullmatch(url)
        assert parts is not None, "checked with the options"
        self.url = "/".join(filter(None, (url.rstrip("/"), folder)))
        self._bucket = parts["bucket"]
        self._prefix = "".join(f"{part}/" for part in (parts["prefix"][1:], folder) if part)
        self._client = _make_client(self.url)

    def list_names(self, start: str = "") -> list[str]:
        """Return the names that begin with `start`, sorted."""
        pages = self._call(
            lambda: list(
                self._client.get_paginator("list_objects_v2").paginate(
                    Bucket=self._bucket, Prefix=self._prefix + start
                )
            )
        )
        return sorted(
            entry["Key"][len(self._prefix) :]
            for page in pages
            for entry in page.get("Contents", ())
        )

    def list_folders(self, start: str) -> list[str]:
        """Return the first parts of the names that begin with `start`, up to their first slash."""
        pages = self._call(
            lambda: list(
                self._client.get_paginator("list_objects_v2").paginate(
                    Bucket=self._bucket, Prefix=self._prefix + start, Delimiter="/"
                )
            )
        )
        return [
            entry["Prefix"][len(self._prefix) : -1]
            for page in pages
            for entry in page.get("CommonPrefixes", ())
        ]

    def read(self, name: str) -> Iterator[bytes]:
        """Yield the content of an object in pieces; raise FileNotFoundError if there is none."""
        with self._translate_errors():
            body = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]
            with body:
                yield from body.iter_chunks(_CHUNK)

    def write(self, name: str, content: bytes) -> None:
        """Write a small object."""
        self._put(name, content)
        self._verify(name, len(content), _checksum(content), hashing.bytes_digest(content))

    def upload(self, name: str, path: Path, size: int, digest: str) -> None:
        """Write a file as an object, and verify the object. digest: its digest in the manifest.

        Raises ArtifactError, and makes no object, if the file does not match its size and digest;
        FileNotFoundError if it is gone.
        """
        part_size = max(_PART, units.ceil_div(size, _MOST_PARTS))
        hasher = hashing.new_hasher(digest.partition(":")[0])

        def require_same(bytes_read: int) -> None:
            if (bytes_read, hashing.format_digest(hasher, digest.partition(":")[0])) != (
                size,
                digest,
            ):
                raise ArtifactError(f"{path} has other content than when it was written")

        with path.open("rb", buffering=0) as file:
            if size <= part_size:
                content = file.readall()
                hasher.update(content)
                require_same(len(content))
                self._put(name, content)
                checksum = _checksum(content)
            else:
                parts = _read_parts(file, part_size, hasher)
                checksum = self._upload_parts(name, parts, require_same)
        self._verify(name, size, checksum, digest)

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects. A name without an object is no error.

        Raises StageError if the bucket refuses to delete one.
        """
        keys = [{"Key": self._prefix + name} for name in names]
        for first in range(0, len(keys), _DELETED_AT_ONCE):
            batch = {"Objects": keys[first : first + _DELETED_AT_ONCE], "Quiet": True}
            with self._translate_errors():
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=batch)
            if errors := answer.get("Errors"):
                raise StageError(f"{self.url}: {errors[0].get('Message', 'an object')}")

    def abort_uploads(self, start: str) -> None:
        """Discard the parts that killed uploads left, for objects whose names begin with `start`.

        Errors are ignored: not all servers and permissions allow it, and the parts do no harm.
        """
        with suppress(StageError), self._translate_errors():
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix + start
            )
            for upload in [upload for page in pages for upload in page.get("Uploads", ())]:
                self._client.abort_multipart_upload(
                    Bucket=self._bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )

    def _put(self, name: str, content: bytes) -> None:
        self._call(
            lambda: self._client.put_object(
                Bucket=self._bucket,
                Key=self._prefix + name,
                Body=content,
                ChecksumAlgorithm="SHA256",
                ChecksumSHA256=_checksum(content),
            )
        )

    def _upload_parts(
        self, name: str, parts: Iterator[bytes], require_same: Callable[[int], None]
    ) -> str:
        """Upload the parts of an object, some at a time, and return the checksum of the object.

        require_same: called with the number of bytes before the parts become an object.
        """
        where = {"Bucket": self._bucket, "Key": self._prefix + name}
        upload = where | {
            "UploadId": self._call(
                lambda: self._client.create_multipart_upload(**where, ChecksumAlgorithm="SHA256")
            )["UploadId"]
        }

        def send(number: int, content: bytes) -> dict[str, Any]:
            checksum = _checksum(content)
            answer = self._call(
                lambda: self._client.upload_part(
                    **upload, PartNumber=number, Body=content, ChecksumSHA256=checksum
                )
            )
            return {"PartNumber": number, "ETag": answer["ETag"], "ChecksumSHA256": checksum}

        sent: list[dict[str, Any]] = []
        pending: deque[Future[dict[str, Any]]] = deque()
        size = 0
        try:
            with ThreadPoolExecutor(_PARALLEL) as threads:
                for number, content in enumerate(parts, 1):
                    if len(pending) == _PARALLEL:
                        sent.append(pending.popleft().result())
                    pending.append(threads.submit(send, number, content))
                    size += len(content)
                sent += [future.result() for future in pending]
            require_same(size)
            self._call(
                lambda: self._client.complete_multipart_upload(
                    **upload, MultipartUpload={"Parts": sent}
                )
            )
        except BaseException:
            with suppress(StageError):
                self._call(lambda: self._client.abort_multipart_upload(**upload))
            raise
        digests = b"".join(base64.b64decode(part["ChecksumSHA256"]) for part in sent)
        return _checksum(digests)

    def _verify(self, name: str, size: int, checksum: str, digest: str) -> None:
        """Raise StageError if the object differs from what was written.

        checksum: SHA-256 in base64, of the object or of the SHA-256 of its parts. digest: for
        servers without such checksums, the digest of the content.
        """
        head = self._call(
            lambda: self._client.head_object(
                Bucket=self._bucket, Key=self._prefix + name, ChecksumMode="ENABLED"
            )
        )
        reported = head.get("ChecksumSHA256", "").partition("-")[0]
        if head["ContentLength"] == size and reported == checksum:
            return
        hasher = hashing.new_hasher(digest.partition(":")[0])
        for chunk in self.read(name):
            hasher.update(chunk)
        if hashing.format_digest(hasher, digest.partition(":")[0]) != digest:
            raise StageError(f"{self.url}/{name} has other content than what was written there")

    def _call(self, request: Callable[[], Any]) -> Any:
        with self._translate_errors():
            return request()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        from botocore import exceptions

        user_errors = (
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.ProfileNotFound,
            exceptions.ParamValidationError,
        )
        try:
            yield
        except exceptions.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            if code == "NoSuchKey":
                raise FileNotFoundError(
                    errno.ENOENT, "there is no such object", self.url
                ) from error
            kind = UsageError if code in _REFUSALS else StageError
            raise kind(f"{self.url}: {_summarize_error(error)}") from error
        except exceptions.BotoCoreError as error:
            kind = UsageError if isinstance(error, user_errors) else StageError
            raise kind(f"{self.url}: {_summarize_error(error)}") from error
        except OSError as error:
            if error.filename is not None:  # a file of this machine, not the network
                raise
            raise StageError(f"{self.url}: {_summarize_error(error)}") from error


def _read_parts(file: Any, part_size: int, hasher: hashing.Hasher) -> Iterator[bytes]:
    """Yield the content of a file in parts of equal size, and hash it on the way."""
    while True:
        part = bytearray()
        while len(part) < part_size and (chunk := file.read(part_size - len(part))):
            part += chunk
        if not part:
            return
        content = bytes(part)
        hasher.update(content)
        yield content


def _checksum(content: bytes) -> str:
    """Return the SHA-256 in base64, as S3 expects it."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


def _summarize_error(error: Exception) -> str:
    """Return an error as one line without passwords."""
    text = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else str(error)
    return redact_urls(" ".join(text.split()))[:_MAX_ERROR_LENGTH]


def _make_client(url: str) -> Any:
    try:
        import boto3
        from botocore import exceptions
        from botocore.config import Config
    except ImportError as error:
        raise UsageError(
            f"{url} needs the package boto3, which is not installed",
            found=str(error),
            run=commands.pip_install_optional("boto3"),
        ) from error
    logging.getLogger("botocore").setLevel(logging.CRITICAL)  # errors are raised
    # Servers other than AWS rarely resolve BUCKET.HOST.
    has_custom_endpoint = bool(
        os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    )
    try:
        return boto3.session.Session().client(
            "s3",
            config=Config(
                connect_timeout=10,
                read_timeout=60,
                retries={"mode": "standard", "max_attempts": 4},
                max_pool_connections=_PARALLEL + 1,
                # Servers other than AWS may not know the checksums that boto3 would add.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
                s3={"addressing_style": "path"} if has_custom_endpoint else None,
            ),
        )
    except (exceptions.BotoCoreError, ValueError) as error:  # such as an unknown AWS_PROFILE
        raise UsageError(f"{url}: {_summarize_error(error)}") from error
