"""A local stand-in for the Hub: an HTTP server for the requests of stage 03, with failures.

Requests for large files are redirected to a second server, as the Hub redirects to its storage,
which must not receive the token. The Hub offers such files by Xet too, which no test asks for.
"""

from __future__ import annotations

import functools
import hashlib
import json
import ssl
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".model", ".gz")
_PAGE = 3  # entries of a directory listing per answer


@dataclass
class Repo:
    """A repository: content by path at one commit, whose names are `main` and its hash.

    kind: model or dataset. served: content to send instead of the true one, by path. cut: bytes
    after which the connection breaks, once, by path. sizes: wrong sizes to declare, by path. slow:
    seconds before each 64 KiB of a large file. busy: answers to give first, once each, as (status,
    headers), by path of a file, or "" for the API; busy_storage: the same of the second server.
    no_ranges: ignore Range. undeclared: paths without a declared digest.
    """

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    kind: str = "model"
    token: str = ""
    gated: bool = False
    served: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    slow: float = 0.0
    busy: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    busy_storage: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)
    no_ranges: bool = False
    undeclared: set[str] = field(default_factory=set)

    def info(self, name: str) -> dict:
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": self.commit,
            "private": False,
            "gated": "manual" if self.gated else False,
            "tags": [],
            "downloads": 0,
            "siblings": [self._sibling(path) for path in self.files],
        }

    def tree(self) -> list[dict]:
        folders = {path.rpartition("/")[0] for path in self.files} - {""}
        entries = [
            {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
            for path in sorted(folders)
        ]
        for path in sorted(self.files):
            sibling = self._sibling(path)
            entry = {
                "type": "file",
                "path": path,
                "size": sibling["size"],
                "oid": sibling["blobId"],
            }
            if "lfs" in sibling:
                entry["lfs"] = {
                    "oid": sibling["lfs"]["sha256"],
                    "size": sibling["size"],
                    "pointerSize": 134,
                }
            entries.append(entry)
        return entries

    def _sibling(self, path: str) -> dict:
        content = self.files[path]
        sibling = {"rfilename": path, "size": self.sizes.get(path, len(content))}
        if path.endswith(LFS_SUFFIXES):
            digest = _sha256(content)
            sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
        if path in self.undeclared:
            return {"rfilename": path, "size": sibling["size"]}
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {**sibling, "blobId": blob}


@dataclass
class Request:
    path: str
    range: str
    token: str
    from_storage: bool
    query: str = ""
    method: str = "GET"


class HubServer:
    """Serves `repos` by name and records all requests; a context manager.

    certificate: a PEM file with key and certificate, to serve over TLS.
    """

    def __init__(self, certificate: Path | None = None) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self._servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), self._handler(is_storage))
            for is_storage in (False, True)
        ]
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            for server in self._servers:
                server.socket = context.wrap_socket(server.socket, server_side=True)
        scheme = "https" if certificate else "http"
        self.url, self.storage_url = (
            f"{scheme}://127.0.0.1:{s.server_port}" for s in self._servers
        )

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def paths(self, containing: str = "") -> list[str]:
        """Return the requested paths that contain a text, since the last `requests.clear()`."""
        return [request.path for request in self.requests if containing in request.path]

    def _handler(self, storage: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                split = urlsplit(self.path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                request = Request(
                    unquote(split.path),
                    self.headers.get("Range", ""),
                    token,
                    storage,
                    split.query,
                    self.command,
                )
                hub.requests.append(request)
                try:
                    hub.answer(self, request)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def answer(self, http: BaseHTTPRequestHandler, request: Request) -> None:
        kind, name, revision, file = _split_path(request.path)
        repo = self.repos.get(name)
        if repo is not None and repo.kind != kind:
            repo = None
        is_hidden = repo and repo.token and not repo.gated and request.token != repo.token
        if repo is None or (is_hidden and not request.from_storage):
            # The Hub answers 401 to anonymous users whether or not a repository exists.
            return _send_error(http, 404 if request.token else 401, "RepoNotFound")
        if revision not in ("main", repo.commit):
            return _send_error(http, 404, "RevisionNotFound")
        busy = repo.busy_storage if request.from_storage else repo.busy
        if busy.get(file):
            status, headers = busy[file].pop(0)
            return _send_error(http, status, "", headers)
        if not file:
            if "/tree/" in request.path:
                return self._send_tree(http, request, repo)
            return _send_json(http, json.dumps(repo.info(name)).encode())
        if repo.gated and request.token != repo.token and not request.from_storage:
            return _send_error(http, 403 if request.token else 401, "GatedRepo")
        if file not in repo.files:
            return _send_error(http, 404, "EntryNotFound")
        if file.endswith(LFS_SUFFIXES) and not request.from_storage:
            http.send_response(302)
            http.send_header("Location", f"{self.storage_url}{request.path}")
            http.send_header("X-Repo-Commit", repo.commit)
            http.send_header("X-Xet-Hash", "0" * 64)  # downloads by HTTP do not need it
            http.send_header("X-Xet-Refresh-Route", f"{self.url}/api/xet")
            http.send_header("X-Linked-Size", str(repo.sizes.get(file, len(repo.files[file]))))
            http.send_header("X-Linked-Etag", f'"{_sha256(repo.files[file])}"')
            http.send_header("Content-Length", "0")
            return http.end_headers()
        self._send_file(http, request, repo, file)

    def _send_tree(self, http: BaseHTTPRequestHandler, request: Request, repo: Repo) -> None:
        entries = repo.tree()
        start = int(parse_qs(request.query).get("cursor", ["0"])[0])
        end = start + _PAGE
        link = {}
        if end < len(entries):
            link["Link"] = f'<{self.url}{request.path}?recursive=true&cursor={end}>; rel="next"'
        _send_json(http, json.dumps(entries[start:end]).encode(), link)

    def _begin_file(
        self, http: BaseHTTPRequestHandler, request: Request, repo: Repo, size: int, tag: str
    ) -> tuple[int, int]:
        """Send the headers of an answer with a file; return the range of bytes to send."""
        first, _, last = request.range.removeprefix("bytes=").partition("-")
        is_range = bool(request.range) and not repo.no_ranges
        start, stop = (int(first), int(last or size - 1) + 1) if is_range else (0, size)
        http.send_response(206 if is_range else 200)
        http.send_header("Content-Length", str(stop - start))
        if is_range:
            http.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        http.send_header("ETag", f'"{tag}"')
        http.send_header("X-Repo-Commit", repo.commit)
        http.end_headers()
        return start, stop

    def _send_file(
        self, http: BaseHTTPRequestHandler, request: Request, repo: Repo, file: str
    ) -> None:
        content = repo.served.get(file, repo.files[file])
        start, stop = self._begin_file(http, request, repo, len(content), _sha256(content))
        if request.method == "HEAD":
            return
        end = repo.cut.pop(file, stop)
        for offset in range(start, end, 1 << 16):
            if file.endswith(LFS_SUFFIXES):
                time.sleep(repo.slow)
            http.wfile.write(content[offset : min(offset + (1 << 16), end)])
        http.close_connection = True


@functools.lru_cache(maxsize=64)
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _split_path(path: str) -> tuple[str, str, str, str]:
    """Return kind, repository, revision and file of a request path; file "" for the API."""
    for kind in ("model", "dataset"):
        if path.startswith(f"/api/{kind}s/"):
            rest = path.removeprefix(f"/api/{kind}s/").replace("/tree/", "/revision/")
            name, _, revision = rest.partition("/revision/")
            return kind, name, revision or "main", ""
    kind = "dataset" if path.startswith("/datasets/") else "model"
    name, _, rest = path.removeprefix("/datasets").lstrip("/").partition("/resolve/")
    revision, _, file = rest.partition("/")
    return kind, name, revision, file


def _send_json(
    http: BaseHTTPRequestHandler, content: bytes, headers: dict[str, str] | None = None
) -> None:
    http.send_response(200)
    http.send_header("Content-Type", "application/json")
    http.send_header("Content-Length", str(len(content)))
    for name, value in (headers or {}).items():
        http.send_header(name, value)
    http.end_headers()
    http.wfile.write(content)


def _send_error(
    http: BaseHTTPRequestHandler, status: int, code: str, headers: dict[str, str] | None = None
) -> None:
    http.send_response(status)
    if code:
        http.send_header("X-Error-Code", code)
        http.send_header("X-Error-Message", f"refused: {code}")
    for name, value in (headers or {}).items():
        http.send_header(name, value)
    http.send_header("Content-Length", "0")
    http.end_headers()
