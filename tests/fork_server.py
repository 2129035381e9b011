"""Start scripts by fork, in milliseconds, from a process that has imported everything.

The server accepts connections at a socket, its standard input, and ends with the last one. The
processes that a connection has asked for end with it. It reads JSON requests: `{"script": …,
"argv": […], "cwd": …, "env": {…}, "cores": […], "ranks": [{…}, …]}` starts the script once for each
entry of `ranks`, which contains additional environment variables, on these cores. Three file
descriptors come with a request: standard output, standard error, and a file for reports. The server
writes a line `{"pids": […]}` to the latter and, for each process that ends, `{"ended": pid,
"code": …}`; the code is negative for a signal. If a request contains "call", the processes call
this function (`module:name`) with `argv` as arguments, instead of the script. "before" is a
function that each rank calls first, with its rank and the keyword arguments in "given". Processes
draw plots and pages if "pages" is true.

The argument names the kind of server. `stages` imports lib/ and the Hugging Face packages; each
process reads the settings of huggingface_hub again from its environment. `bare` imports neither,
for stages that run a model's own code. `launch` imports launch/, lib/core and lib/runs, not torch.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _modules(pattern: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(ROOT.glob(pattern))
        if not path.stem.startswith("__")
    ]


_MODEL_MODULES = [f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama")]
_IMPORTS = {
    "stages": [
        *_modules("lib/*/*.py"),
        *_MODEL_MODULES,
        "awkward",
        "datasets",
        "gigatoken",
        "matplotlib.backends.backend_agg",
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.record_writer",
        "torch.distributed.checkpoint",
        "torch.profiler._cupti_monitor",
        "torch.utils.serialization",
        "transformers.models.auto.tokenization_auto",
        "yaml",
    ],
    "bare": [
        "torch._dynamo",
        "torch.onnx",
        "torch.testing",
        "torch.distributed.fsdp",
        "torch.distributed.tensor.parallel",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining",
        "torch.nn.attention.flex_attention",
        "PIL.Image",
        "fsspec",
        "jinja2",
        "pandas",
        "pyarrow.dataset",
        "pyarrow.parquet",
        "requests",
        "safetensors.torch",
        "tokenizers",
        "yaml",
    ],
    "launch": [
        *_modules("lib/core/*.py"),
        *_modules("lib/runs/*.py"),
        *_modules("launch/*.py"),
        *_modules("launch/runs/*.py"),
        *_modules("launch/cloud/*.py"),
        *_modules("launch/cloud/[ik]*/*.py"),
        "yaml",
    ],
}


# What draws plots and pages, by class and name of the method.
_DRAWN: dict[tuple[type, str], Callable[..., None]] = {}


class Server:
    """Forks processes, and reports when each of them ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: set[socket.socket] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        # By pid: the connection that asked for the process, its pidfd, and the file for reports.
        self._running: dict[int, tuple[socket.socket, int, int]] = {}

    def serve(self) -> tuple[dict[str, Any], int, list[int]] | None:
        """Serve requests until the last connection ends, then return None.

        In a forked process, returns the request, the rank, and the files.
        """
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None:
                    self._reap(key.data)
                elif (forked := self._answer(key.fileobj)) is not None:
                    return forked
                elif not self._connections:
                    return None

    def _accept(self) -> None:
        connection = self._listener.accept()[0]
        self._connections.add(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _answer(self, connection: socket.socket) -> tuple[dict[str, Any], int, list[int]] | None:
        """Start the processes of a request; in each of them, return what `serve` returns."""
        message: bytes = b""
        files: list[int] = []
        with contextlib.suppress(ConnectionError):
            message, files, *_ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return self._end(connection)
        request = json.loads(message)
        for rank in range(len(request["ranks"])):
            if not self._fork(connection, files[2]):
                return request, rank, files
        _send_report(files[2], {"pids": list(self._running)[-len(request["ranks"]) :]})
        for file in files:
            os.close(file)
        return None

    def _fork(self, connection: socket.socket, report: int) -> int:
        if pid := os.fork():
            pidfd = os.pidfd_open(pid)
            self._running[pid] = (connection, pidfd, os.dup(report))
            self._selector.register(pidfd, selectors.EVENT_READ, pid)
        else:
            self._selector.close()
            self._listener.close()
            for other in self._connections:
                other.close()
        return pid

    def _reap(self, pid: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        _, pidfd, report = self._running.pop(pid)
        self._selector.unregister(pidfd)
        _send_report(report, {"ended": pid, "code": code})
        os.close(pidfd)
        os.close(report)

    def _end(self, connection: socket.socket) -> None:
        for pid, (client, *_) in self._running.items():
            if client is connection:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
        self._selector.unregister(connection)
        self._connections.remove(connection)
        connection.close()


def _send_report(file: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the reader is gone
        os.write(file, json.dumps(message).encode() + b"\n")


def become_script(request: dict[str, Any], rank: int, files: list[int]) -> None:
    """Turn a fork into a process like one that a command line starts."""
    os.setsid()
    os.sched_setaffinity(0, request["cores"])
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[:2])):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"] | request["ranks"][rank])
    sys.argv = [request["script"], *request["argv"]]
    if "call" not in request:
        script = Path(request["script"])
        # `python -m` puts the current directory there, which is the root of the repository.
        sys.path[0] = str(ROOT if script.name == "__main__.py" else script.parent)
    if "before" in request:
        _import_function(request["before"])(rank, **request["given"])


def _speed_up_stages() -> None:
    """Do work of all stages once, before the forks, and skip plots and pages."""
    from transformers import conversion_mapping

    from lib.core import offline

    conversion_mapping.get_checkpoint_conversion_mapping(
        "llama"
    )  # compiles a thousand regular expressions

    def enable() -> None:
        """Enable offline mode without the error that the imports came first."""
        os.environ.update(offline.OFFLINE_ENVIRONMENT)
        _read_settings()

    offline.enable_offline_mode = enable
    _fork_servers_of_workers()
    for owner, name in list_drawing():
        _DRAWN[owner, name] = getattr(owner, name)
        setattr(owner, name, skip_drawing)


def list_drawing() -> list[tuple[type, str]]:
    """Return the classes that draw plots and pages, each with the name of its method for that."""
    from lib.runs.metrics import Curve
    from lib.train.output.page_writer import PageWriter

    return [(Curve, "draw"), (PageWriter, "start")]


def skip_drawing(*arguments: object, **options: object) -> None:
    """Draw nothing: plots and pages take half of the time of a tiny run."""


def _fork_servers_of_workers() -> None:
    """Let stage 02 fork the server of its workers, since its imports would take half a second."""
    from multiprocessing import util

    spawn = util.spawnv_passfds

    def fork_or_spawn(path: bytes, words: list[str], files: list[int]) -> int:
        if "multiprocessing.forkserver" not in words[-1]:
            return spawn(path, words, files)
        if pid := os.fork():
            return pid
        try:
            for number in signal.valid_signals():
                if callable(signal.getsignal(number)):
                    signal.signal(number, signal.SIG_DFL)
            descriptors = sorted({0, 1, 2, *files})
            for low, high in zip(
                descriptors, [*descriptors[1:], os.sysconf("SC_OPEN_MAX")], strict=True
            ):
                os.closerange(low + 1, high)
            exec(words[-1], {})
        finally:
            os._exit(0)

    util.spawnv_passfds = fork_or_spawn


def _draw_pages() -> None:
    """Let this process draw plots and pages after all."""
    for (owner, name), method in _DRAWN.items():
        setattr(owner, name, method)


def _read_settings() -> None:
    """Let huggingface_hub read this process's environment again, as at its import."""
    from huggingface_hub import constants

    importlib.reload(constants)
    constants.HF_HUB_DISABLE_TELEMETRY = True  # stage 03 sets these before the import
    constants.HF_HUB_DISABLE_XET = True


def _import_function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(kind: str) -> None:
    """Import the modules of a kind and serve; in a fork, run what the request asks for."""
    from lib.core import offline

    if kind == "stages":
        offline.enable_offline_mode()
    for name in _IMPORTS[kind]:
        importlib.import_module(name)
    if kind == "stages":
        _speed_up_stages()
    gc.collect()
    gc.freeze()
    request_parts = Server(socket.socket(fileno=os.dup(0))).serve()
    if request_parts is None:
        return
    become_script(*request_parts)
    if kind == "stages":
        _read_settings()
    request = request_parts[0]
    if request.get("pages"):
        _draw_pages()
    if "call" in request:
        _import_function(request["call"])(*request["argv"])
        sys.stdout.flush()
        os._exit(0)
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1])
