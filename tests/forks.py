"""Starts stages by fork from a process that has everything imported; see fork_server.py."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parent.parent
_GUARD = str(ROOT / "tests" / "network_guard")
# The tests mean the CPU also on a machine with GPUs, which may have fewer than ranks.
CPU = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
_AT_FIRST = {**os.environ, **CPU}

# Variables that no package reads while it is imported. Where another one differs from what the
# server was started with, only a new interpreter gives what a user would see.
_READ_LATE = re.compile(
    "NETWORK_GUARD_REPORT|PYTEST_.*|(|LOCAL_|GROUP_)(RANK|WORLD_SIZE)|MASTER_.*"
    "|TORCHELASTIC_.*|TORCHINDUCTOR_.*|SLURM_.*|TMPDIR|COLUMNS"
    "|RAYON_NUM_THREADS|TOKENIZERS_PARALLELISM|LAUNCH_MARK"
)
_SETTING = re.compile("(?!PYTHON|LC_|LD_|LANG|MALLOC_).*")
_HUB = re.compile("HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|SSL_.*|(?i:no_proxy|https?_proxy)")
# What torchrun gives the others before it kills them is half a minute.
_GRACE_S = 5.0
PATIENCE_S = 120.0


class Launch:
    """The processes of a script: one, or one per rank."""

    def __init__(self, reports: IO[bytes]) -> None:
        self._reports = reports
        self.pids: list[int] = json.loads(reports.readline())["pids"]
        self._codes: dict[int, int] = {}

    @property
    def codes(self) -> list[int | None]:
        """Return the ranks' exit codes, negative for a signal, None while they run."""
        return [self._codes.get(pid) for pid in self.pids]

    def poll(self, patience: float = 0.0) -> bool:
        """Tell whether all ranks have ended. patience: seconds to wait for the next one to end."""
        while (
            len(self._codes) < len(self.pids)
            and select.select([self._reports], [], [], patience)[0]
        ):
            ended = json.loads(self._reports.readline())
            self._codes[ended["ended"]] = ended["code"]
            patience = 0.0
        return len(self._codes) == len(self.pids)

    def wait(self, timeout: float = PATIENCE_S) -> list[int]:
        """Return the exit codes; kill all and raise TimeoutError after so many seconds."""
        deadline = time.monotonic() + timeout
        while not self.poll(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                self.kill()
                raise TimeoutError(f"did not end within {timeout:.0f} s")
        return self.codes

    def supervise(self, timeout: float) -> int:
        """Return what torchrun would: 0, or 1 after a rank has failed and the others are ended."""
        deadline = time.monotonic() + timeout
        while not self.poll(max(0.0, deadline - time.monotonic())):
            if any(self._codes.values()):
                self.signal(signal.SIGTERM)
                self.poll(_GRACE_S)
                self.kill()
            elif time.monotonic() >= deadline:
                self.wait(0)
        return int(any(self._codes.values()))

    def signal(self, number: int, rank: int | None = None) -> None:
        """Send a signal to one rank or all that still run."""
        self.poll()
        for pid in self.pids if rank is None else [self.pids[rank]]:
            if pid not in self._codes:
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all ranks, and wait until they are gone."""
        self.signal(signal.SIGKILL)
        while not self.poll(1.0):
            pass


class ForkServer:
    """A process that has imported what fork_server.py has for a kind, and forks launches."""

    def __init__(self, kind: str) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = ours
        self._kind = kind
        self._environment = {**_AT_FIRST, "PYTHONPATH": _GUARD}
        command = [sys.executable, str(ROOT / "tests" / "fork_server.py"), kind]
        self._process = subprocess.Popen(
            command,
            stdin=its,
            stdout=subprocess.DEVNULL,
            cwd=ROOT,
            start_new_session=True,
            env={**self._environment, "NETWORK_GUARD_REPORT": os.devnull},
        )
        its.close()
        atexit.register(self.close)

    def serves(self, environment: dict[str, str]) -> bool:
        """Tell whether a process forked is like one started in this environment."""
        late = {"launch": [_SETTING]}.get(self._kind, [_READ_LATE, _HUB])
        differ = {
            name
            for name, _ in {"PYTHONPATH": _GUARD, **environment}.items() ^ self._environment.items()
        }
        return all(any(names.fullmatch(name) for names in late) for name in differ)

    def start(
        self,
        script: str,
        argv: Sequence[object],
        cwd: Path,
        environment: dict[str, str],
        out: int,
        err: int,
        ranks: Sequence[dict[str, str]] = ({},),
        **how: Any,
    ) -> IO[bytes]:
        """Start a script; return what a Launch reads its processes from.

        out, err: open files. ranks: the variables of each. how: "call", "before" and "given" of
        a request.
        """
        readable, writable = os.pipe()
        request = {
            "script": script,
            "argv": [str(argument) for argument in argv],
            "cwd": str(cwd),
            "env": environment,
            "ranks": ranks,
            **how,
        }
        socket.send_fds(self._requests, [json.dumps(request).encode()], [out, err, writable])
        os.close(writable)
        return os.fdopen(readable, "rb", buffering=0)

    def close(self) -> None:
        """End it, and all that it has started."""
        atexit.unregister(self.close)
        self._requests.close()
        self._process.wait()


def rank_variables(ranks: int, port: int) -> list[dict[str, str]]:
    """Return what torchrun sets in the environment of each rank of one machine."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "none",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def kind_for(script: str, arguments: Sequence[object]) -> str:
    """Return the kind of server that has imported what a command needs and may have."""
    if script in ("launch/build_image.py", "launch/kubernetes.py", "launch/monitor.py"):
        return "launch"
    return "bare" if script.startswith("03") and "--trust-remote-code" in arguments else "stages"


@functools.cache
def server(kind: str) -> ForkServer:
    """Return the server of this test process, started when it is first asked for."""
    return ForkServer(kind)
