"""A local HTTP server that stands for the Hub: the requests that stage 03 makes, and its failures.

Large files are answered with a redirect to a second server, as the real Hub redirects to its
storage; the token must not follow there.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".model")


@dataclass
class Repo:
    """A repository: content by path at one commit, known as `main` and by its hash.

    served: what comes over the wire instead of the true content of a path. cut: path → bytes
    after which the connection breaks, once. sizes: declared bytes that are not true.
    slow: seconds before each 64 KiB of a large file.
    """

    files: dict[str, bytes]
    commit: str = "0123456789abcdef0123456789abcdef01234567"
    token: str = ""
    gated: bool = False
    served: dict[str, bytes] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    slow: float = 0.0

    def info(self, name: str) -> dict:
        return {"_id": "1", "id": name, "modelId": name, "sha": self.commit, "private": False,
                "gated": "manual" if self.gated else False, "tags": [], "downloads": 0,
                "siblings": [self._sibling(path) for path in self.files]}

    def _sibling(self, path: str) -> dict:
        content = self.files[path]
        sibling = {"rfilename": path, "size": self.sizes.get(path, len(content))}
        if path.endswith(LFS_SUFFIXES):
            digest = hashlib.sha256(content).hexdigest()
            sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {**sibling, "blobId": blob}


@dataclass
class Request:
    path: str
    range: str
    token: str
    from_storage: bool


class HubServer:
    """Serves `repos` by name and keeps every request; use as a context manager."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self._servers = [ThreadingHTTPServer(("127.0.0.1", 0), self._handler(storage))
                         for storage in (False, True)]
        self.url, self.storage_url = (f"http://127.0.0.1:{s.server_port}" for s in self._servers)

    def __enter__(self) -> HubServer:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def paths(self, containing: str = "") -> list[str]:
        """Return the paths asked for since the last call of `requests.clear()`."""
        return [request.path for request in self.requests if containing in request.path]

    def _handler(self, storage: bool) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = unquote(urlsplit(self.path).path)
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                request = Request(path, self.headers.get("Range", ""), token,
                                  storage)
                hub.requests.append(request)
                try:
                    hub.answer(self, request)
                except (BrokenPipeError, ConnectionResetError):
                    pass

            def log_message(self, *arguments: object) -> None:
                pass

        return Handler

    def answer(self, http: BaseHTTPRequestHandler, request: Request) -> None:
        name, revision, file = _split(request.path)
        repo = self.repos.get(name)
        is_hidden = repo and repo.token and not repo.gated and request.token != repo.token
        if repo is None or (is_hidden and not request.from_storage):
            # The Hub says 401 to anonymous users whether or not a repository exists.
            return _refuse(http, 404 if request.token else 401, "RepoNotFound")
        if revision not in ("main", repo.commit):
            return _refuse(http, 404, "RevisionNotFound")
        if not file:
            return _send(http, json.dumps(repo.info(name)).encode())
        if repo.gated and request.token != repo.token and not request.from_storage:
            return _refuse(http, 403 if request.token else 401, "GatedRepo")
        if file not in repo.files:
            return _refuse(http, 404, "EntryNotFound")
        if file.endswith(LFS_SUFFIXES) and not request.from_storage:
            http.send_response(302)
            http.send_header("Location", f"{self.storage_url}{request.path}")
            http.send_header("X-Repo-Commit", repo.commit)
            http.send_header("Content-Length", "0")
            return http.end_headers()
        self._send_file(http, request, repo, file)

    def _send_file(self, http: BaseHTTPRequestHandler, request: Request, repo: Repo,
                   file: str) -> None:
        content = repo.served.get(file, repo.files[file])
        start = int(request.range.removeprefix("bytes=").rstrip("-") or 0)
        http.send_response(206 if start else 200)
        http.send_header("Content-Length", str(len(content) - start))
        if start:
            http.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        http.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        http.send_header("X-Repo-Commit", repo.commit)
        http.end_headers()
        end = repo.cut.pop(file, len(content))
        for at in range(start, end, 1 << 16):
            if file.endswith(LFS_SUFFIXES):
                time.sleep(repo.slow)
            http.wfile.write(content[at:min(at + (1 << 16), end)])
        http.close_connection = True


def _split(path: str) -> tuple[str, str, str]:
    """Return repository, revision and file of a request path; file "" for the API."""
    if path.startswith("/api/models/"):
        name, _, revision = path.removeprefix("/api/models/").partition("/revision/")
        return name, revision or "main", ""
    name, _, rest = path.lstrip("/").partition("/resolve/")
    revision, _, file = rest.partition("/")
    return name, revision, file


def _send(http: BaseHTTPRequestHandler, content: bytes) -> None:
    http.send_response(200)
    http.send_header("Content-Type", "application/json")
    http.send_header("Content-Length", str(len(content)))
    http.end_headers()
    http.wfile.write(content)


def _refuse(http: BaseHTTPRequestHandler, status: int, code: str) -> None:
    http.send_response(status)
    http.send_header("X-Error-Code", code)
    http.send_header("X-Error-Message", f"refused: {code}")
    http.send_header("Content-Length", "0")
    http.end_headers()
