"""A local stand-in for S3, with faults: an HTTP server with the requests of lib/hub/folder.py."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
_KEY_ID = "test-key"
_SECRET = "the-secret-of-the-tests"
_PAGE = 3  # names in an answer, so that listings have several pages


@dataclass
class S3Store:
    """Contains the objects of one bucket by name, and the faults of the server.

    etags: by name, as S3 reports them: the MD5 of the content, or of the MD5 of its parts. uploads:
    the parts of each upload, by number. has_own_keys: whether the ETags are no MD5, as with
    encryption by own keys. corrupts: pattern of the names of objects in which a bit changes.
    status: the error with which all requests are answered. hangs: whether to answer nothing.
    seconds: time before the answer to an upload. requests: method and name of each request.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    etags: dict[str, str] = field(default_factory=dict)
    uploads: dict[str, tuple[str, dict[int, bytes]]] = field(default_factory=dict)
    has_own_keys: bool = False
    corrupts: str = "nothing is corrupted"
    status: int = 0
    hangs: bool = False
    seconds: float = 0.0
    requests: list[tuple[str, str]] = field(default_factory=list)

    def put(self, name: str, parts: list[bytes]) -> None:
        """Store an object, perhaps damaged; the ETag is that of the stored bytes."""
        if re.search(self.corrupts, name) and parts[0]:
            parts = [bytes([parts[0][0] ^ 1]) + parts[0][1:], *parts[1:]]
        self.objects[name] = b"".join(parts)
        sums = b"".join(hashlib.md5(part).digest() for part in parts)
        is_whole = len(parts) == 1
        self.etags[name] = sums.hex() if is_whole else f"{_md5(sums)}-{len(parts)}"
        if self.has_own_keys:
            self.etags[name] = _md5(b"a key" + sums)


def _md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    store: S3Store
    connections: list[socket.socket]
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # bytes; headers and content in one packet
    _numbers = itertools.count(1)

    def setup(self) -> None:
        super().setup()
        self.connections.append(self.connection)

    def handle_expect_100(self) -> bool:
        is_expected = super().handle_expect_100()
        self.wfile.flush()  # the client waits for this answer before it sends the content
        return is_expected

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET

    def _serve(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        bucket, _, name = unquote(parts.path).lstrip("/").partition("/")
        query = {key: values[0] for key, values in parse_qs(parts.query, True).items()}
        self.store.requests.append((self.command, name))
        while self.store.hangs:
            time.sleep(0.05)
        if self.store.status:
            self._refuse(self.store.status, "SlowDown", "Please reduce your request rate.")
        elif f"Credential={_KEY_ID}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "InvalidAccessKeyId", "The AWS Access Key Id does not exist.")
        elif bucket != BUCKET:
            self._refuse(404, "NoSuchBucket", "The specified bucket does not exist")
        else:
            if self.command == "PUT":
                time.sleep(self.store.seconds)
            getattr(self, f"_{self.command.lower()}")(name, query, content)

    def _put(self, name: str, query: dict[str, str], content: bytes) -> None:
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][1][int(query["partNumber"])] = content
        else:
            self.store.put(name, [content])
        self._answer(b"", {"ETag": f'"{_md5(content)}"'})

    def _post(self, name: str, query: dict[str, str], content: bytes) -> None:
        if "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self.store.uploads[upload] = name, {}
            self._answer(f"<R><UploadId>{upload}</UploadId></R>".encode())
        else:
            parts = self.store.uploads.pop(query["uploadId"])[1]
            self.store.put(name, [parts[number] for number in sorted(parts)])
            self._answer(b'<R><ETag>"e"</ETag></R>')

    def _get(self, name: str, query: dict[str, str], content: bytes) -> None:
        if "uploads" in query:
            uploads = "".join(
                f"<Upload><Key>{escape(key)}</Key><UploadId>{upload}</UploadId></Upload>"
                for upload, (key, _) in self.store.uploads.items()
                if key.startswith(query["prefix"])
            )
            self._answer(f"<R><IsTruncated>false</IsTruncated>{uploads}</R>".encode())
        elif "list-type" in query:
            self._list(query)
        elif name in self.store.objects:
            self._answer_range(self.store.objects[name])
        else:
            self._refuse(404, "NoSuchKey", "The specified key does not exist.")

    def _answer_range(self, content: bytes) -> None:
        if not (asked_range := self.headers.get("Range")):
            self._answer(content)
            return
        first, last = (int(number) for number in asked_range.partition("=")[2].split("-"))
        self._answer(content[first : last + 1], status=206)

    def _list(self, query: dict[str, str]) -> None:
        start = query["prefix"]
        names = sorted(name for name in self.store.objects if name.startswith(start))
        folders = set()
        if query.get("delimiter"):
            rests = {name: name[len(start) :] for name in names}
            folders = {start + r.partition("/")[0] + "/" for r in rests.values() if "/" in r}
            names = [name for name, rest in rests.items() if "/" not in rest]
        entries = [("CommonPrefixes", "Prefix", folder) for folder in sorted(folders)]
        entries += [("Contents", "Key", name) for name in names]
        first = int(query.get("continuation-token", 0))
        page = "".join(
            f"<{outer}><{inner}>{escape(text)}</{inner}><Size>1</Size></{outer}>"
            for outer, inner, text in entries[first : first + _PAGE]
        )
        is_cut = len(entries) > first + _PAGE
        more = f"<NextContinuationToken>{first + _PAGE}</NextContinuationToken>" if is_cut else ""
        cut = str(is_cut).lower()
        self._answer(f"<R><IsTruncated>{cut}</IsTruncated>{page}{more}</R>".encode())

    def _head(self, name: str, query: dict[str, str], content: bytes) -> None:
        if name not in self.store.objects:
            self._answer(b"", status=404)
            return
        self._answer(self.store.objects[name], {"ETag": f'"{self.store.etags.get(name)}"'})

    def _delete(self, name: str, query: dict[str, str], content: bytes) -> None:
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"], None)
        else:
            self.store.objects.pop(name, None)
        self._answer(b"", status=204)

    def _refuse(self, status: int, code: str, text: str) -> None:
        self._answer(
            f"<Error><Code>{code}</Code><Message>{text}</Message></Error>".encode(), {}, status
        )

    def _answer(
        self, content: bytes, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


class S3Server:
    """A server that can be stopped and started again with its objects."""

    def __init__(self) -> None:
        self.store = S3Store()
        self._connections: list[socket.socket] = []
        more = {"store": self.store, "connections": self._connections}
        self._handler = type("Handler", (_Handler,), more)
        self._port = 0
        self.start()

    def start(self) -> None:
        """Listen on the port of the first start."""
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Break all connections, as if the server was killed, and refuse new ones."""
        self._server.shutdown()
        self._server.server_close()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def environment(self, key_id: str = _KEY_ID) -> dict[str, str]:
        """Return the environment variables of a client, with an address and credentials."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": key_id,
            "AWS_SECRET_ACCESS_KEY": _SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


@contextmanager
def serve_s3() -> Iterator[S3Server]:
    """Run a server for the time of a context."""
    server = S3Server()
    try:
        yield server
    finally:
        server.store.hangs = False
        server.stop()
