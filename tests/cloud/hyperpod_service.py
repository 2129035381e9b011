"""Serve the API of a HyperPod cluster's store for checkpoints, on this machine.

By default this is a stand-in. If SAGEMAKER_CHECKPOINTING_SOURCES is the directory of the unpacked
source package of amzn-sagemaker-checkpointing, it is the server of that package's own tests; after
a `:` the variable may name a directory with fastapi and uvicorn.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.conftest import free_port

_SOURCES = os.environ.get("SAGEMAKER_CHECKPOINTING_SOURCES", "")


class _Store:
    def __init__(self) -> None:
        self.namespaces: dict[str, dict[str, int]] = {}
        self.slots: dict[tuple[str, int, int], tuple[bytes, str]] = {}  # namespace, rank, step

    def put(self, namespace: str, rank: int, step: int, content: tuple[bytes, str]) -> None:
        """Store a part, and drop the rank's oldest part if it has more than the namespace keeps."""
        self.slots[namespace, rank, step] = content
        steps = [s for n, r, s in self.slots if (n, r) == (namespace, rank)]
        if len(steps) > self.namespaces[namespace]["steps_to_retain_per_rank"]:
            del self.slots[namespace, rank, min(steps)]

    def drop(self, namespace: str) -> None:
        """Delete a namespace and its parts."""
        del self.namespaces[namespace]
        self.slots = {key: value for key, value in self.slots.items() if key[0] != namespace}


class _Handler(BaseHTTPRequestHandler):
    store: _Store
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # bytes; headers and content in one packet

    def do_GET(self) -> None:
        self._serve("GET")

    def do_POST(self) -> None:
        self._serve("POST")

    def do_DELETE(self) -> None:
        self._serve("DELETE")

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self, method: str) -> None:
        url = urlsplit(self.path)
        query = {key: int(values[0]) for key, values in parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kind, namespace, rest = re.fullmatch(r"/v1/cp/(\w+)/([\w-]+)(?:/(.+))?", url.path).groups()
        try:
            if kind == "namespaces":
                self._answer(self._namespace(method, namespace, query))
            elif rest == "latest":
                self._namespace(method, namespace, query)
                steps = {s for n, _, s in self.store.slots if n == namespace}
                self._answer(sorted(steps, reverse=True)[: query["limit"]])
            else:
                self._slot(method, namespace, *map(int, rest.split("/")), body)
        except KeyError:
            self._answer({"detail": "not found"}, 404)

    def _namespace(self, method: str, name: str, query: dict[str, int]) -> Any:
        if method == "POST":
            self.store.namespaces[name] = {
                "num_ranks": query["num_ranks"],
                "steps_to_retain_per_rank": query["steps_retained"],
            }
        elif method == "DELETE":
            self.store.drop(name)
            return {}
        return self.store.namespaces[name]

    def _slot(self, method: str, namespace: str, rank: int, step: int, body: bytes) -> None:
        if method == "POST":
            self.store.put(namespace, rank, step, (body, self.headers["Shard-Meta"]))
            self._answer({})
        elif method == "DELETE":
            del self.store.slots[namespace, rank, step]
            self._answer({})
        else:
            content, meta = self.store.slots[namespace, rank, step]
            self._answer(content, meta=meta)

    def _answer(self, content: Any, status: int = 200, meta: str = "") -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if meta:
            self.send_header("Shard-Meta", meta)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def run_service(port: int = 0) -> Iterator[str]:
    """Serve an empty store, and yield its address."""
    port = port or free_port()
    with _run_from_sources(port) if _SOURCES else _run_stand_in(port):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _run_stand_in(port: int) -> Iterator[None]:
    handler = type("Handler", (_Handler,), {"store": _Store()})
    server = ThreadingHTTPServer(("127.0.0.1", port), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _run_from_sources(port: int) -> Iterator[None]:
    code = (
        "import uvicorn; from tests.local_tests.membrain_server import app; "
        f"uvicorn.run(app, host='127.0.0.1', port={port}, log_level='warning')"
    )
    sources = _SOURCES.partition(os.pathsep)[0]
    server = subprocess.Popen(
        [sys.executable, "-c", code], cwd=sources, env=os.environ | {"PYTHONPATH": _SOURCES}
    )
    try:
        deadline = time.monotonic() + 90
        while not _is_ready(port):
            assert server.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)
        yield
    finally:
        server.kill()
        server.wait()


def _is_ready(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/v1/cp/namespaces/none")
        return connection.getresponse().status == 404
    except OSError:
        return False
    finally:
        connection.close()
