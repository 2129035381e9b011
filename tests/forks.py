"""Start stages as forks of a process that has imported everything; see fork_server.py."""

from __future__ import annotations

import atexit
import functools
import hashlib
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
# The tests use the CPU also on a machine with GPUs, which may have fewer GPUs than ranks.
CPU_VARIABLES = {"CUDA_VISIBLE_DEVICES": "-1", "OMP_NUM_THREADS": "1"}
_INITIAL_ENVIRONMENT = {**os.environ, **CPU_VARIABLES}

# Variables that no package reads while it is imported. If another variable differs from the
# server's environment, only a new interpreter behaves as it would for a user.
_LATE_VARIABLES = re.compile(
    "NETWORK_GUARD_REPORT|PYTEST_.*|(|LOCAL_|GROUP_)(RANK|WORLD_SIZE)|MASTER_.*"
    "|TORCHELASTIC_.*|TORCHINDUCTOR_.*|SLURM_.*|TMPDIR|COLUMNS"
    "|RAYON_NUM_THREADS|TOKENIZERS_PARALLELISM|LAUNCH_MARK|AWS_.*"
)
_LAUNCH_VARIABLES = re.compile("(?!PYTHON|LC_|LD_|LANG|MALLOC_).*")
_HUB_VARIABLES = re.compile(
    "HF_.*|HUGGINGFACE_.*|TRANSFORMERS_.*|SSL_.*|(?i:no_proxy|https?_proxy)"
)
# torchrun waits 30 seconds for the other ranks before it kills them; this is enough here.
_GRACE_S = 5.0
TIMEOUT_S = 120.0


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
        """Return whether all ranks have ended. patience: seconds to wait for the next end."""
        while (
            len(self._codes) < len(self.pids)
            and select.select([self._reports], [], [], patience)[0]
        ):
            report = json.loads(self._reports.readline())
            self._codes[report["ended"]] = report["code"]
            patience = 0.0
        return len(self._codes) == len(self.pids)

    def wait(self, timeout: float = TIMEOUT_S) -> list[int]:
        """Wait for all ranks and return the exit codes.

        After `timeout` seconds, kills all ranks and raises TimeoutError.
        """
        deadline = time.monotonic() + timeout
        while not self.poll(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                self.kill()
                raise TimeoutError(f"did not end within {timeout:.0f} s")
        return self.codes

    def supervise(self, timeout: float) -> int:
        """Wait as torchrun does: return 0, or 1 after a rank failed and the others were ended."""
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
        """Send a signal to one rank, or to all ranks that still run."""
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
    """A process of fork_server.py that has imported the modules of a kind and forks launches.

    root: the directory of the code, which contains tests/fork_server.py. All processes of a run of
    pytest-xdist use the same server, since its imports take five seconds.
    """

    def __init__(self, kind: str, root: Path = ROOT) -> None:
        self._kind = kind
        self._environment = {**_INITIAL_ENVIRONMENT, "PYTHONPATH": _GUARD}
        tests = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        name = hashlib.sha256(f"{tests} {root} {kind}".encode()).hexdigest()
        address = f"\0{name}"  # in no directory, and gone with the server
        self._requests = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        while self._requests.connect_ex(address):
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(address)
                except OSError:
                    time.sleep(0.01)  # another process has bound it, and will listen
                else:
                    listener.listen(64)
                    self._start(listener, root)
        atexit.register(self.close)

    def _start(self, listener: socket.socket, root: Path) -> None:
        """Start a server, which ends with its last connection."""
        self._process = subprocess.Popen(
            [sys.executable, str(root / "tests" / "fork_server.py"), self._kind],
            stdin=listener,
            stdout=subprocess.DEVNULL,
            cwd=root,
            start_new_session=True,
            env={**self._environment, "NETWORK_GUARD_REPORT": os.devnull},
        )

    def serves(self, environment: dict[str, str]) -> bool:
        """Return whether a fork behaves like a new process in this environment."""
        patterns = {"launch": [_LAUNCH_VARIABLES]}.get(
            self._kind, [_LATE_VARIABLES, _HUB_VARIABLES]
        )
        changed = {
            name
            for name, _ in {"PYTHONPATH": _GUARD, **environment}.items() ^ self._environment.items()
        }
        return all(any(pattern.fullmatch(name) for pattern in patterns) for name in changed)

    def start(
        self,
        script: str,
        argv: Sequence[object],
        cwd: Path,
        environment: dict[str, str],
        out: int,
        err: int,
        ranks: Sequence[dict[str, str]] = ({},),
        **options: Any,
    ) -> IO[bytes]:
        """Start a script; return the file from which a Launch reads its processes' reports.

        out, err: file descriptors. ranks: environment variables of each rank. options: "call",
        "before" and "given" of a request.
        """
        readable, writable = os.pipe()
        request = {
            "script": script,
            "argv": [str(argument) for argument in argv],
            "cwd": str(cwd),
            "env": environment,
            "ranks": ranks,
            "cores": sorted(os.sched_getaffinity(0)),
            **options,
        }
        socket.send_fds(self._requests, [json.dumps(request).encode()], [out, err, writable])
        os.close(writable)
        return os.fdopen(readable, "rb", buffering=0)

    def close(self) -> None:
        """End the connection, and with it all processes that this process has started."""
        atexit.unregister(self.close)
        self._requests.close()


def rank_variables(ranks: int, port: int) -> list[dict[str, str]]:
    """Return the environment variables that torchrun sets for each rank on one machine."""
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "TORCHELASTIC_RUN_ID": "none",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def choose_kind(script: str, arguments: Sequence[object]) -> str:
    """Return the kind of server for a command: which modules it may find imported."""
    if script in ("launch/build_image.py", "launch/kubernetes.py", "launch/monitor.py"):
        return "launch"
    return "bare" if script.startswith("03") and "--trust-remote-code" in arguments else "stages"


@functools.cache
def get_server(kind: str) -> ForkServer:
    """Return the server of a kind; this test process starts it at the first call."""
    return ForkServer(kind)
