"""Starts scripts in processes that have everything imported: by fork, in milliseconds.

Reads JSON requests from the socket that is its standard input. `{"script": …, "argv": […], "cwd":
…, "env": {…}, "ranks": [{…}, …]}` starts the script once for each entry of `ranks`, which holds
the variables that this rank has besides. With a request come three files: standard output, standard
error, and one that gets a line `{"pids": […]}` and then `{"ended": pid, "code": …}` for each, the
code negative for a signal. "call" starts a function `module:name` with `argv` as its arguments
instead of a script; "before" is a function that each rank calls first, with its number and "given".

Arguments: `stages` has imported lib/ and the Hugging Face packages, whose settings are then read
again from the environment of each process; `bare` has imported neither, for what runs a model's own
code on its way here; `launch` has imported launch/ alone, without torch.
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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def _modules(pattern: str) -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(ROOT.glob(pattern))
        if not path.stem.startswith("__")
    ]


_FAMILIES = [f"transformers.models.{family}.modeling_{family}" for family in ("gpt2", "llama")]
_IMPORTS = {
    "stages": [
        *_modules("lib/*/*.py"),
        *_FAMILIES,
        "datasets",
        "matplotlib.backends.backend_agg",
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.summary.writer.record_writer",
        "torch.distributed.checkpoint",
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
        *_modules("launch/*.py"),
        *_modules("launch/[ikr]*/*.py"),
        "yaml",
    ],
}


class Server:
    """Forks, and tells of each process when it ends."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._selector = selectors.DefaultSelector()
        self._selector.register(requests, selectors.EVENT_READ)
        self._running: dict[int, tuple[int, int]] = {}  # pid: its pidfd, and the file that is told

    def serve(self) -> tuple[dict[str, Any], int, list[int]] | None:
        """Answer until there are no more requests.

        In a process that it has started: return the request, the rank, and the files.
        """
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._reap(key.data)
                    continue
                message, files, *_ = socket.recv_fds(self._requests, 1 << 20, 3)
                if not message:
                    return self._end()
                request = json.loads(message)
                for rank in range(len(request["ranks"])):
                    if not self._fork(files[2]):
                        return request, rank, files
                _tell(files[2], {"pids": list(self._running)[-len(request["ranks"]) :]})
                for file in files:
                    os.close(file)

    def _fork(self, report: int) -> int:
        if pid := os.fork():
            pidfd = os.pidfd_open(pid)
            self._running[pid] = (pidfd, os.dup(report))
            self._selector.register(pidfd, selectors.EVENT_READ, pid)
        else:
            self._selector.close()
            self._requests.close()
        return pid

    def _reap(self, pid: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        pidfd, report = self._running.pop(pid)
        self._selector.unregister(pidfd)
        _tell(report, {"ended": pid, "code": code})
        os.close(pidfd)
        os.close(report)

    def _end(self) -> None:
        for pid in self._running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _tell(file: int, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        os.write(file, json.dumps(message).encode() + b"\n")


def become(request: dict[str, Any], rank: int, files: list[int]) -> None:
    """Turn a process that was just forked into what a command line would have started."""
    os.setsid()
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *files[:2])):
        os.dup2(file, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"] | request["ranks"][rank])
    sys.argv = [request["script"], *request["argv"]]
    if "call" not in request:
        sys.path[0] = str(Path(request["script"]).parent)
    if "before" in request:
        _function(request["before"])(rank, **request["given"])


def _save_work() -> None:
    """Do once what each stage would do again, and leave out what few tests look at."""
    from transformers import conversion_mapping

    from lib.core import offline
    from lib.train import metrics

    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # a thousand regular expressions

    def enable() -> None:
        """Do the same, but do not complain that it does not come before the imports."""
        os.environ.update(offline.OFFLINE_ENVIRONMENT)
        _read_settings()

    offline.enable = enable
    # Pictures are half of the work of a tiny run.
    metrics.Curve.draw = lambda *where: None


def _read_settings() -> None:
    """Let huggingface_hub see this process's environment, which it reads once, at its import."""
    from huggingface_hub import constants

    importlib.reload(constants)
    constants.HF_HUB_DISABLE_TELEMETRY = True  # which stage 03 sets before it imports it


def _function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def main(kind: str) -> None:
    """Import, serve, and in each process that was started do what was asked for."""
    from lib.core import offline

    if kind == "stages":
        offline.enable()
    for name in _IMPORTS[kind]:
        importlib.import_module(name)
    if kind == "stages":
        _save_work()
    gc.collect()
    gc.freeze()
    part = Server(socket.socket(fileno=os.dup(0))).serve()
    if part is None:
        return
    become(*part)
    if kind == "stages":
        _read_settings()
    request = part[0]
    if "call" in request:
        _function(request["call"])(*request["argv"])
        sys.stdout.flush()
        os._exit(0)
    runpy.run_path(request["script"], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    main(sys.argv[1])
