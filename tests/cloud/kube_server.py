"""A small Kubernetes API server on loopback, with the requests that kubectl makes for these jobs.

It keeps objects in memory. It supports discovery, OpenAPI, reading, creating, changing and deleting
objects, dry runs and pod logs, and checks custom resources as a cluster would. A function of the
test stands for the operator: it is called with each new job, and may add pods, events and states.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import jsonschema
import kubernetes_validate
import yaml

from tests.cloud import kube_discovery, kube_exec, kube_schemas

Object = dict[str, Any]


@dataclass(frozen=True)
class Type:
    """A type of resource."""

    group_version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def root(self) -> str:
        return f"{'api' if self.group_version == 'v1' else 'apis'}/{self.group_version}"


CUSTOM_TYPES = (
    Type("kubeflow.org/v1", "pytorchjobs", "PyTorchJob"),
    Type("trainer.kubeflow.org/v1alpha1", "trainjobs", "TrainJob"),
    Type(
        "trainer.kubeflow.org/v1alpha1", "clustertrainingruntimes", "ClusterTrainingRuntime", False
    ),
    Type("sagemaker.amazonaws.com/v1", "hyperpodpytorchjobs", "HyperPodPyTorchJob"),
)
CORE_TYPES = (
    Type("v1", "pods", "Pod"),
    Type("v1", "events", "Event"),
    Type("v1", "secrets", "Secret"),
    Type("v1", "persistentvolumeclaims", "PersistentVolumeClaim"),
    Type("v1", "namespaces", "Namespace", False),
    Type("v1", "nodes", "Node", False),
    Type("batch/v1", "jobs", "Job"),
)
_JOB_KINDS = {"PyTorchJob", "TrainJob", "HyperPodPyTorchJob", "Job"}


class RequestError(Exception):
    """A request failed: HTTP code, reason and message of the answer."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


@dataclass
class Cluster:
    """The objects of a cluster, by (plural of the type, namespace, name).

    on_create: called with each new job. on_pod: called with each new pod that a client creates.
    on_delete: called with each pod that is deleted. on_exec: runs a command in a pod. logs: lines
    by pod. following: pods whose logs continue. log_cuts: numbers of lines after which the next
    connections to a log break. forbidden: parts of `METHOD path` that are refused. failing: how
    many of the next requests to answer with 503. requests: `METHOD path` of all.
    """

    types: list[Type] = field(default_factory=lambda: [*CORE_TYPES, *CUSTOM_TYPES])
    objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    on_create: Callable[[Cluster, Object], None] = lambda cluster, job: None
    on_pod: Callable[[Cluster, Object], None] = lambda cluster, pod: None
    on_delete: Callable[[Cluster, Object], None] = lambda cluster, pod: None
    on_exec: Callable[[Cluster, Object, kube_exec.Call], None] | None = None
    logs: dict[str, list[str]] = field(default_factory=dict)
    log_cuts: list[int] = field(default_factory=list)
    forbidden: list[str] = field(default_factory=list)
    following: set[str] = field(default_factory=set)
    failing: int = 0
    requests: list[str] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def add(self, plural: str, item: Object, namespace: str = "default") -> Object:
        """Add an object without a request."""
        kind = next(type_ for type_ in self.types if type_.plural == plural)
        key = (plural, namespace if kind.namespaced else "", item["metadata"]["name"])
        with self.lock:
            item = {"apiVersion": kind.group_version, "kind": kind.kind, **item}
            item["metadata"] = {
                "uid": f"uid-{len(self.requests)}-{key[2]}",
                "resourceVersion": str(len(self.requests) + 1),
                "creationTimestamp": "2026-01-01T00:00:00Z",
                **item["metadata"],
                **({"namespace": namespace} if kind.namespaced else {}),
            }
            self.objects[key] = item
        return item

    def pods_of(self, job: str) -> list[Object]:
        """Return the pods with a job's label."""
        return [
            item
            for (plural, _, _), item in self.objects.items()
            if plural == "pods" and item["metadata"]["labels"]["app.kubernetes.io/instance"] == job
        ]

    def delete_job(self, job: str) -> None:
        """Delete the pods and events of a job, as the garbage collector would."""
        for pod in self.pods_of(job):
            del self.objects["pods", pod["metadata"]["namespace"], pod["metadata"]["name"]]
            self.on_delete(self, pod)
        for key, event in [*self.objects.items()]:
            if key[0] == "events" and event["involvedObject"]["name"].startswith(job):
                del self.objects[key]


class Server:
    """Serves one cluster at a time; `kubeconfig` writes a file with its address for kubectl.

    home: directory for kubectl's cache of this address.
    """

    home: Path

    def __init__(self, cluster: Cluster) -> None:
        self._handler = type("Handler", (_Handler,), {"cluster": cluster})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def serve(self, cluster: Cluster) -> Cluster:
        """Serve another cluster from now on."""
        self._handler.cluster = cluster
        return cluster

    def kubeconfig(self, path: Path, context: str = "test") -> Path:
        """Write a kubeconfig whose only context is this cluster."""
        address = f"http://127.0.0.1:{self._server.server_address[1]}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": context,
                    "clusters": [{"name": "c", "cluster": {"server": address}}],
                    "users": [{"name": "u", "user": {}}],
                    "contexts": [{"name": context, "context": {"cluster": "c", "user": "u"}}],
                }
            )
        )
        return path

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise every answer waits 40 ms for an acknowledgement
    cluster: Cluster

    def log_message(self, *arguments: object) -> None:
        """Log nothing, since tests read the cluster's `requests`."""

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(path.query).items()}
        try:
            with self.cluster.lock:
                self.cluster.requests.append(f"{self.command} {self.path}")
                if any(part in self.cluster.requests[-1] for part in self.cluster.forbidden):
                    raise RequestError(403, "Forbidden", f'"{path.path}" is forbidden')
                if self.cluster.failing:
                    self.cluster.failing -= 1
                    raise RequestError(503, "ServiceUnavailable", "etcdserver: leader changed")
            if log := re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/log", path.path):
                self._send_log(log[2], query)
                return
            if call := re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)/exec", path.path):
                self._exec(call[1], call[2], parse_qs(path.query))
                return
            with self.cluster.lock:
                answer = self._answer(path.path.strip("/"), query, body)
            self._send(201 if self.command == "POST" else 200, answer)
        except RequestError as refused:
            self._send(
                refused.code,
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "status": "Failure",
                    "code": refused.code,
                    "reason": refused.reason,
                    "message": str(refused),
                },
            )

    do_GET = do_POST = do_PATCH = do_PUT = do_DELETE = _handle

    def _send(self, code: int, answer: Object) -> None:
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _send_log(self, pod: str, query: dict[str, str]) -> None:
        """Send a pod's lines in chunks, as long as the client follows and the log continues."""
        if pod not in self.cluster.logs:
            raise RequestError(404, "NotFound", f'pods "{pod}" not found')
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        cut = (
            self.cluster.log_cuts.pop(0)
            if self.cluster.log_cuts and query.get("follow") == "true"
            else -1
        )
        for number, chunk in enumerate(self._log_lines(pod, query)):
            if number == cut:
                self.close_connection = True
                return
            self.wfile.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _exec(self, namespace: str, name: str, query: dict[str, list[str]]) -> None:
        """Run a command in a pod, over a WebSocket."""
        pod = self._get(next(type_ for type_ in CORE_TYPES if type_.kind == "Pod"), namespace, name)
        statuses = pod.get("status", {}).get("containerStatuses") or [{}]
        if "running" not in statuses[0].get("state", {}) or self.cluster.on_exec is None:
            raise RequestError(500, "InternalError", f'container of pod "{name}" is not running')
        self.cluster.on_exec(self.cluster, pod, kube_exec.accept_call(self, query))
        self.close_connection = True

    def _log_lines(self, pod: str, query: dict[str, str]) -> Iterator[bytes]:
        sent = 0
        if "tailLines" in query:
            sent = max(0, len(self.cluster.logs[pod]) - int(query["tailLines"]))
        while True:
            lines = self.cluster.logs.get(pod, [])
            for number, line in enumerate(lines[sent:], sent):
                stamp = _stamp(number)
                if stamp[:19] >= query.get("sinceTime", "")[:19]:
                    yield (
                        f"{stamp} {line}\n".encode()
                        if "timestamps" in query
                        else f"{line}\n".encode()
                    )
            sent = len(lines)
            if query.get("follow") != "true" or pod not in self.cluster.following:
                return
            time.sleep(0.02)

    def _answer(self, path: str, query: dict[str, str], body: bytes) -> Object:
        if (discovery := kube_discovery.answer_discovery(self.cluster.types, path)) is not None:
            return discovery
        type_, namespace, name = self._target(path)
        if self.command == "GET":
            return (
                self._get(type_, namespace, name) if name else self._list(type_, namespace, query)
            )
        if self.command == "DELETE":
            return self._delete(type_, namespace, name)
        item = yaml.safe_load(body)
        key = (type_.plural, namespace, name or item["metadata"]["name"])
        is_new = key not in self.cluster.objects
        if self.command == "POST" and not is_new:
            raise RequestError(409, "AlreadyExists", f'{type_.plural} "{key[2]}" already exists')
        if self.command == "PATCH" and "apply-patch" not in self.headers["Content-Type"]:
            item = _apply_merge_patch(self._get(type_, namespace, name), item)
        return self._store(type_, namespace, item, query, is_new)

    def _store(
        self, type_: Type, namespace: str, item: Object, query: dict[str, str], is_new: bool
    ) -> Object:
        if type_ in CUSTOM_TYPES:
            _require_valid(type_, item, query.get("fieldValidation"))
        if type_.kind in ("Pod", "Job"):
            _require_valid_builtin(item)
        if query.get("dryRun"):
            return item
        home = ("namespaces", "", namespace)
        if type_.namespaced and namespace != "default" and home not in self.cluster.objects:
            raise RequestError(404, "NotFound", f'namespaces "{namespace}" not found')
        stored = self.cluster.add(type_.plural, item, namespace or "default")
        if is_new and type_.kind in _JOB_KINDS:
            self.cluster.on_create(self.cluster, stored)
        if is_new and type_.kind == "Pod":
            self.cluster.on_pod(self.cluster, stored)
        return stored

    def _get(self, type_: Type, namespace: str, name: str) -> Object:
        try:
            return self.cluster.objects[type_.plural, namespace, name]
        except KeyError:
            group = type_.group_version.partition("/")[0]
            resource = type_.plural + (f".{group}" if group != "v1" else "")
            raise RequestError(404, "NotFound", f'{resource} "{name}" not found') from None

    def _list(self, type_: Type, namespace: str, query: dict[str, str]) -> Object:
        labels = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
        fields = dict(part.split("=") for part in query.get("fieldSelector", "").split(",") if part)
        items = [
            item
            for (plural, item_namespace, _), item in sorted(self.cluster.objects.items())
            if plural == type_.plural
            and (not namespace or item_namespace == namespace)
            and labels.items() <= item["metadata"].get("labels", {}).items()
            and all(_get_field(item, path) == value for path, value in fields.items())
        ]
        return {
            "kind": f"{type_.kind}List",
            "apiVersion": type_.group_version,
            "metadata": {"resourceVersion": "1"},
            "items": items,
        }

    def _delete(self, type_: Type, namespace: str, name: str) -> Object:
        item = self._get(type_, namespace, name)
        del self.cluster.objects[type_.plural, namespace, name]
        if type_.kind in _JOB_KINDS:
            self.cluster.delete_job(name)
        if type_.kind == "Pod":
            self.cluster.on_delete(self.cluster, item)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def _target(self, path: str) -> tuple[Type, str, str]:
        """Return the type, namespace and name in a path; "" for parts that it lacks."""
        for type_ in self.cluster.types:
            pattern = rf"{type_.root}(?:/namespaces/([^/]+))?/{type_.plural}(?:/([^/]+))?"
            if match := re.fullmatch(pattern, path):
                return type_, match[1] or "", match[2] or ""
        raise RequestError(404, "NotFound", "the server could not find the requested resource")


def _stamp(number: int) -> str:
    """Return the timestamp of a line: ten lines per second."""
    return f"2026-01-01T00:{number // 600 % 60:02}:{number // 10 % 60:02}.{number % 10:09}Z"


def _require_valid(type_: Type, item: Object, validation: str | None) -> None:
    """Raise RequestError for wrong values and, with strict validation, for unknown fields."""
    validator = jsonschema.Draft202012Validator(kube_schemas.load_schema(type_.kind))
    for error in validator.iter_errors(item):
        path = ".".join(map(str, error.absolute_path))
        if error.validator != "additionalProperties":
            raise RequestError(
                422,
                "Invalid",
                f'{type_.kind} "{item["metadata"]["name"]}" is invalid: {path}: {error.message}',
            )
        if validation == "Strict":
            raise RequestError(
                400,
                "BadRequest",
                f"strict decoding error: unknown field in {path}: {error.message}",
            )


def _require_valid_builtin(item: Object) -> None:
    """Raise RequestError if a Pod or Job is not valid, or has unknown fields."""
    try:
        kubernetes_validate.validate(item, "1.34", strict=True)
    except kubernetes_validate.ValidationError as error:
        path = ".".join(map(str, error.path))
        raise RequestError(422, "Invalid", f"{item['kind']}: {path}: {error.message}") from None


def _apply_merge_patch(into: Any, patch: Any) -> Any:
    """Return a value with a JSON merge patch applied."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(into) if isinstance(into, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _apply_merge_patch(merged.get(key), value)
    return merged


def _get_field(item: Any, path: str) -> str:
    for part in path.split("."):
        item = item.get(part, {}) if isinstance(item, dict) else {}
    return item if isinstance(item, str) else ""
