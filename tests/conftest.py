"""What every test may use: stages as subprocesses, and a guard against real network traffic."""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lib.core import reading
from tests import forks

ROOT = Path(__file__).resolve().parent.parent
_GUARD = Path(__file__).parent / "network_guard"
os.environ["PYTHONPATH"] = str(_GUARD)
_AT_FIRST = dict(os.environ)

# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# One core for each process of pytest -n, and for all it starts: as many threads as cores in each of
# several processes wait for each other most of the time.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})

StageRunner = Callable[..., subprocess.CompletedProcess]

pytest_plugins = [
    "tests.training",
    "tests.hub_models",
    "tests.faults",
    "tests.kube_cluster",
    "tests.needs",
]


@pytest.fixture(autouse=True)
def as_it_was():
    """Undo what lib/ puts into the environment of this process when a test calls it.

    In another environment than at first, run_stage cannot fork, and takes seconds for each stage.
    """
    yield
    for name in os.environ.keys() | _AT_FIRST.keys():
        if not name.startswith("PYTEST_"):
            if name not in _AT_FIRST:
                del os.environ[name]
            elif os.environ.get(name) != _AT_FIRST[name]:
                os.environ[name] = _AT_FIRST[name]


@pytest.fixture(autouse=True)
def unchanged_masks() -> Iterator[None]:
    """Restore the function by which transformers finds packed documents after each test.

    `attention.avoid_device_reads` replaces it for the whole process, which in stage 04 trains one
    model. Later tests compare with plain models of transformers.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = masking and masking.find_packed_sequence_indices
    yield
    if masking:
        masking.find_packed_sequence_indices = original


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an iterator over files that do not exist: a directory per test would be slow."""
    folder = tmp_path_factory.mktemp("network")
    return (folder / f"connections_{number}.txt" for number in itertools.count())


@pytest.fixture(autouse=True)
def no_foreign_sockets(as_it_was: None, reports: Iterator[Path], monkeypatch: pytest.MonkeyPatch):
    """Fail a test when one of its Python processes connects beyond this machine."""
    report = next(reports)
    monkeypatch.setenv("NETWORK_GUARD_REPORT", str(report))
    yield
    if report.exists():
        pytest.fail(f"connected beyond this machine:\n{report.read_text()}")


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that has the disk fail so many of the next reads of raw text."""
    left = [0]

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def read(file: io.FileIO, *more: Any) -> Any:
            if left[0]:
                left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(file, *more)

        return read

    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(
        reading,
        "io",
        SimpleNamespace(
            FileIO=SimpleNamespace(
                __init__=io.FileIO.__init__,
                readinto=failing(io.FileIO.readinto),
                readall=failing(io.FileIO.readall),
            )
        ),
    )
    return lambda times: left.__setitem__(0, times)


def stage_command(script: str, *arguments: object, ranks: int = 0) -> list[str]:
    """Return the command line of a stage; ranks > 0 starts it through torchrun."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *(torchrun if ranks else []), str(ROOT / script), *map(str, arguments)]


def run_stage(
    script: str,
    *arguments: object,
    cwd: Path,
    expect: int | None = 0,
    ranks: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 300,
    fresh: bool = False,
    before: str = "",
) -> subprocess.CompletedProcess:
    """Run a stage in a directory, assert its exit code (None: any) and return what it printed.

    ranks > 0: that many ranks; returns 1 for any failure, as torchrun does. fresh: start an
    interpreter, and torchrun, of its own, as a person does, instead of a fork of one that has
    everything imported, and draws no pictures; so does an environment that matters at import.
    before: `module:function` that a fork calls first.
    """
    command = stage_command(script, *arguments, ranks=ranks)
    environment = {**os.environ, **forks.CPU, **(env or {})}
    server = None if fresh else forks.server(forks.kind_for(script, arguments))
    if server is None or not server.serves(environment):
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment
        )
    else:
        done = _run_forked(
            server, command, script, arguments, cwd, environment, ranks, timeout, before
        )
    if expect is not None:
        assert done.returncode == expect, (
            f"{command}\nexit {done.returncode}, expected "
            f"{expect}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done


def _run_forked(
    server: forks.ForkServer,
    command: list[str],
    script: str,
    arguments: tuple[object, ...],
    cwd: Path,
    environment: dict[str, str],
    ranks: int,
    timeout: float,
    before: str,
) -> subprocess.CompletedProcess:
    how = {"before": before, "given": {}} if before else {}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        launch = forks.Launch(
            server.start(
                str(ROOT / script),
                arguments,
                cwd,
                environment,
                out.fileno(),
                err.fileno(),
                forks.rank_variables(ranks, free_port()) if ranks else [{}],
                **how,
            )
        )
        code = launch.supervise(timeout) if ranks else launch.wait(timeout)[0]
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


def start_stage(
    script: str,
    *arguments: object,
    cwd: Path,
    output: Path | int | None = None,
    env: dict[str, str] | None = None,
    ranks: int = 0,
) -> forks.Launch:
    """Start a stage by fork, to be disturbed while it runs. output: file, or its number, for what
    it prints.
    """
    environment = {**os.environ, **forks.CPU, **(env or {})}
    server = forks.server(forks.kind_for(script, arguments))
    assert server.serves(environment), "only a new interpreter is like one in this environment"
    if isinstance(output, int):
        output = os.dup(output)  # which is closed with the file
    with open(output or os.devnull, "ab") as file:  # noqa: PTH123 (a device is no Path)
        return forks.Launch(
            server.start(
                str(ROOT / script),
                arguments,
                cwd,
                environment,
                file.fileno(),
                file.fileno(),
                forks.rank_variables(ranks, free_port()) if ranks else [{}],
            )
        )


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill_all(process: subprocess.Popen, directory: Path) -> None:
    """Kill a launch with all its ranks: torchrun gives each a session of its own."""

    def is_ours(entry: Path) -> bool:
        try:
            command = (entry / "cmdline").read_bytes()
            return b"04_train_fsdp.py" in command and (entry / "cwd").readlink() == directory
        except OSError:
            return False  # it has just ended

    while ours := [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if is_ours(entry)]:
        for pid in ours:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> StageRunner:
    """Return `run_stage` with the test's own directory as the default one to run in."""

    def run(
        script: str, *arguments: object, cwd: Path | None = None, **how: object
    ) -> subprocess.CompletedProcess:
        return run_stage(script, *arguments, cwd=cwd or tmp_path, **how)

    return run
