"""Fixtures and functions for all tests: stages as processes, and a guard against the network."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import gc
import importlib
import io
import itertools
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest

from lib.core import reading
from lib.core.errors import StageError
from tests import forks

ROOT = Path(__file__).resolve().parent.parent
_GUARD = Path(__file__).parent / "network_guard"
_PORTS = (12_000, 32_000)  # below those that the kernel gives to connections
_TAKEN_PORTS: set[int] = set()
os.environ["PYTHONPATH"] = str(_GUARD)
_INITIAL_ENVIRONMENT = dict(os.environ)

# If a shell starts the tests in the background, they and their child processes ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Under pytest -n each worker and its child processes use one core: if each of several processes had
# as many threads as cores, the threads would mostly wait for each other.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(worker[2:]) % len(cores)]})

# Importing packages and collecting the tests creates a million objects, hardly any of them garbage.
# Looking for garbage among them would take a third of the time, in each worker.
gc.disable()


# What `make test` runs: what must never break. In a run of all tests, the others count as slow.
ESSENTIAL = (
    *("checkpoints/*", "core/*", "optim/*", "runs/*", "tokens/*"),
    *("test_faults_*", "test_repository.py", "test_stage_04*", "test_airgap.py"),
    *("curate/test_key_groups.py", "curate/test_leaders.py", "curate/test_minhash.py"),
    *("curate/test_recall.py", "curate/test_shingles.py", "parallel/test_isolation.py"),
    *("parallel/test_layout.py", "parallel/test_loss.py", "parallel/test_one_rank.py"),
    *("parallel/test_parallelize.py", "parallel/test_placement.py", "train/test_experiment.py"),
    *("train/test_inputs.py", "train/test_plan.py", "train/test_rows.py", "train/test_state.py"),
)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip test files that contain no test for the first mark of `-m`.

    Importing them would take seconds, or half a minute for those that are not essential.
    """
    words = (config.option.markexpr or "not").split()
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if not is_test or not words[0].isidentifier():
        return None
    if words[:2] == ["not", "slow"]:
        return True if _counts_as_slow(collection_path, config) else None
    if words[0] == "not" or (words[0] == "slow" and _counts_as_slow(collection_path, config)):
        return None
    return None if f"mark.{words[0]}" in collection_path.read_text("utf-8") else True


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of a file that is not essential."""
    if _counts_as_slow(item.path, item.config):
        item.add_marker(pytest.mark.slow)


def _counts_as_slow(path: Path, config: pytest.Config) -> bool:
    """Return whether all tests of a file count as slow, which no typed path of a test does."""
    if config.args != config.getini("testpaths"):
        return False
    name = path.relative_to(ROOT / "tests").as_posix()
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in ESSENTIAL)


def pytest_collection(session: pytest.Session) -> None:
    """Import the test files in a different order in each worker, if it collects all of them.

    If no compiled files are stored yet, as in a fresh checkout, each worker of pytest-xdist would
    compile every test file with its assertions, which takes 15 seconds. So each worker begins at a
    different file. When it reaches the first file of another worker, that file and the next ones
    are already compiled.
    """
    if not worker or session.config.args != session.config.getini("testpaths"):
        return
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted(ROOT.glob("tests/**/test_*.py"))
        if not pytest_ignore_collect(path, session.config)
    ]
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = int(worker[2:]) * len(names) // workers
    for name in names[first:] + names[:first]:
        # pytest imports a failed file again, and reports the error.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_collection_finish() -> None:
    """Look for garbage again while tests run."""
    gc.enable()


StageRunner = Callable[..., subprocess.CompletedProcess]

pytest_plugins = [
    "tests.training",
    "tests.hub_models",
    "tests.faults",
    "tests.cloud.kube_cluster",
    "tests.cloud.kube_node",
    "tests.make_targets",
    "tests.needs",
]
if not worker and re.search(r"(^| )-n ?[1-9]", " ".join(sys.argv[1:])):
    # This process only starts others, which run the tests; the imports would delay them.
    pytest_plugins.clear()


@pytest.fixture(autouse=True)
def restore_environment():
    """Restore the environment variables that lib/ has set in this process during a test.

    In a changed environment run_stage cannot fork, and each stage takes seconds longer.
    """
    yield
    for name in os.environ.keys() | _INITIAL_ENVIRONMENT.keys():
        if not name.startswith("PYTEST_"):
            if name not in _INITIAL_ENVIRONMENT:
                del os.environ[name]
            elif os.environ.get(name) != _INITIAL_ENVIRONMENT[name]:
                os.environ[name] = _INITIAL_ENVIRONMENT[name]


@pytest.fixture(autouse=True)
def restore_masks() -> Iterator[None]:
    """After each test, restore the function by which transformers finds packed documents.

    `attention.avoid_device_reads` replaces it for the whole process. Stage 04 trains one model per
    process, but here later tests compare with plain models of transformers.
    """
    masking = sys.modules.get("transformers.masking_utils")
    original = masking and masking.find_packed_sequence_indices
    yield
    if masking:
        masking.find_packed_sequence_indices = original


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return an iterator over paths of new files; a directory per test would be slow."""
    folder = tmp_path_factory.mktemp("network")
    return (folder / f"connections_{number}.txt" for number in itertools.count())


@pytest.fixture(autouse=True)
def forbid_foreign_connections(
    restore_environment: None, reports: Iterator[Path], monkeypatch: pytest.MonkeyPatch
):
    """Fail a test if one of its Python processes connects to another machine."""
    report = next(reports)
    monkeypatch.setenv("NETWORK_GUARD_REPORT", str(report))
    yield
    if report.exists():
        pytest.fail(f"connected to another machine:\n{report.read_text()}")


@pytest.fixture
def failing_reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the next N reads of raw text fail."""
    failures_left = [0]

    def fail_or_call(read_method: Callable[..., Any]) -> Callable[..., Any]:
        def read(file: io.FileIO, *arguments: Any) -> Any:
            if failures_left[0]:
                failures_left[0] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read_method(file, *arguments)

        return read

    monkeypatch.setattr(reading, "_PAUSES_S", (0.0, 0.0))
    monkeypatch.setattr(
        reading,
        "io",
        SimpleNamespace(
            FileIO=SimpleNamespace(
                __init__=io.FileIO.__init__,
                readinto=fail_or_call(io.FileIO.readinto),
                readall=fail_or_call(io.FileIO.readall),
            )
        ),
    )
    return lambda times: failures_left.__setitem__(0, times)


def stage_command(script: str, *arguments: object, ranks: int = 0) -> list[str]:
    """Return the command line of a stage. ranks: number to start with torchrun; 0: no torchrun."""
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
    pages: bool = False,
) -> subprocess.CompletedProcess:
    """Run a stage in a directory, assert its exit code (None: any) and return its result.

    By default the stage is a fork of a process that has imported everything, and draws no plot and
    no page.
    fresh: start a new interpreter, and torchrun, as a user does. An environment that matters for
    imports has the same effect. ranks: number of ranks, if not 0; the exit code is then 1 for any
    failure, as with torchrun. before: `module:function` that a fork calls first. pages: whether a
    fork draws plots and pages.
    """
    command = stage_command(script, *arguments, ranks=ranks)
    environment = {**os.environ, **forks.CPU_VARIABLES, **(env or {})}
    server = None if fresh else forks.get_server(forks.choose_kind(script, arguments))
    if server is None or not server.serves(environment):
        result = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout, env=environment
        )
    else:
        result = run_forked(
            server, command, script, arguments, cwd, environment, ranks, timeout, before, pages
        )
    if expect is not None:
        assert result.returncode == expect, (
            f"{command}\nexit {result.returncode}, expected "
            f"{expect}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        )
    return result


def run_code(
    code: str, *arguments: object, cwd: Path, **options: Any
) -> subprocess.CompletedProcess:
    """Run Python code, as `python -c` does, in a fork that has imported torch and transformers.

    options: as for `run_stage`.
    """
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "code.py"
        script.write_text(code)
        return run_stage(str(script), *arguments, cwd=cwd, **options)


def run_forked(
    server: forks.ForkServer,
    command: list[str],
    script: str,
    arguments: tuple[object, ...],
    cwd: Path,
    environment: dict[str, str],
    ranks: int,
    timeout: float,
    before: str = "",
    pages: bool = False,
) -> subprocess.CompletedProcess:
    """Run a script as a fork of a server and return its result; see `run_stage`."""
    options: dict[str, Any] = {"pages": pages}
    if before:
        options |= {"before": before, "given": {}}
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
                **options,
            )
        )
        try:
            code = launch.supervise(timeout) if ranks else launch.wait(timeout)[0]
        except TimeoutError as error:
            ends = [read_all(file)[-3000:] for file in (out, err)]
            raise TimeoutError("\n".join([f"{command} {error}", *ends])) from None
        return subprocess.CompletedProcess(command, code, read_all(out), read_all(err))


def read_all(file: IO[str]) -> str:
    """Return the content of an open file from its beginning."""
    file.seek(0)
    return file.read()


def start_stage(
    script: str,
    *arguments: object,
    cwd: Path,
    output: Path | int | None = None,
    env: dict[str, str] | None = None,
    ranks: int = 0,
) -> forks.Launch:
    """Start a stage by fork and return at once, for a test that disturbs it.

    output: a path or file descriptor for the output of the stage.
    """
    environment = {**os.environ, **forks.CPU_VARIABLES, **(env or {})}
    server = forks.get_server(forks.choose_kind(script, arguments))
    assert server.serves(environment), "in this environment a stage needs a new interpreter"
    if isinstance(output, int):
        output = os.dup(output)  # `with` closes the copy
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


def wait_until(condition: Callable[[], object], seconds: float = 300) -> None:
    """Wait until a condition holds. Fails the test after some seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def message_lines(error: StageError) -> list[str]:
    """Return the lines of an error without the command that it repeats."""
    return [line.strip() for line in error.render().splitlines() if not line.startswith("  run:")]


def free_port() -> int:
    """Return a port that is free, and that no other process which runs tests gets.

    The kernel gives a connection any port of its own range, also one that a test wants to listen
    on a moment later. So the port is below that range.
    """
    lock = _open_port_lock()
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        if port in _TAKEN_PORTS:
            continue
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        _TAKEN_PORTS.add(port)
        return port


@cache
def _open_port_lock() -> int:
    """Open the file whose bytes are locked for the ports; it stays open until the process ends."""
    return os.open(Path(tempfile.gettempdir()) / "ports-of-tests.lock", os.O_RDWR | os.O_CREAT)


def kill_all(process: subprocess.Popen, directory: Path) -> None:
    """Kill a launch with all its ranks, which torchrun starts in their own sessions."""

    def is_ours(entry: Path) -> bool:
        try:
            command = (entry / "cmdline").read_bytes()
            return b"04_train_fsdp.py" in command and (entry / "cwd").readlink() == directory
        except OSError:
            return False  # the process has just ended

    while pids := [int(entry.name) for entry in Path("/proc").glob("[0-9]*") if is_ours(entry)]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        time.sleep(0.05)
    process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> StageRunner:
    """Return `run_stage`, which by default runs in the test's own directory."""

    def run(
        script: str, *arguments: object, cwd: Path | None = None, **options: object
    ) -> subprocess.CompletedProcess:
        return run_stage(script, *arguments, cwd=cwd or tmp_path, **options)

    return run
