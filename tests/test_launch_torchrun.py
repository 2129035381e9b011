# covers: launch/torchrun.py, lib/core/launcher.py
"""Test torchrun without its banners: only the ranks' own errors are printed."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch import torchrun
from lib.core.launcher import headline
from tests.conftest import ROOT, free_port
from tests.trainer_stand_in import run_launcher

RANKS = """
import os, signal, time
from pathlib import Path
printed = Path("printed")
if os.environ["RANK"] == "0":
    print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
    printed.touch()
    time.sleep(60)
while not printed.exists():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def run_torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, ROOT / "launch" / "torchrun.py", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )


def test_a_killed_rank_is_named_in_one_line(tmp_path: Path) -> None:
    import torch

    (tmp_path / "ranks.py").write_text(RANKS)
    result = run_torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "ranks.py")
    assert result.returncode == 128 + signal.SIGKILL
    assert result.stdout == f"threads {max(1, torch.get_num_threads() // 2)}\n"
    start, line = result.stderr.splitlines()
    assert start.startswith("launcher: "), "printed before torch is imported"
    assert line.startswith("error: rank 1 (process ") and "SIGKILL" in line and "dmesg" in line


@pytest.mark.slow
def test_a_rank_that_ends_without_an_error_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text("import os; os._exit(7 * (os.environ['RANK'] == '1'))")
    result = run_torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "ranks.py")
    assert result.returncode == 7
    start, line = result.stderr.splitlines()
    assert start.startswith("launcher: "), "printed before torch is imported"
    assert line.startswith("error: rank 1 (process ") and "exit code 7" in line


@pytest.mark.parametrize("count", ["0", "many"])
def test_a_number_of_ranks_below_one_is_refused(tmp_path: Path, count: str) -> None:
    result = run_torchrun(tmp_path, "--nproc-per-node", count, "ranks.py")
    assert result.returncode == 2 and f"--nproc-per-node {count} starts no rank" in result.stderr
    assert "Traceback" not in result.stderr and "AssertionError" not in result.stderr


def test_a_loopback_interface_that_is_down_is_reported_at_once(tmp_path: Path) -> None:
    """As in a new network namespace; torchrun would try to connect for two minutes."""
    apart = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*apart, "true"]).returncode:
        pytest.skip("needs network namespaces")
    program = [sys.executable, str(ROOT / "launch" / "torchrun.py"), "--standalone", "ranks.py"]
    result = subprocess.run(
        [*apart, *program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 2 and "each other at 127.0.0.1" in result.stderr
    assert "ip link set lo up" in result.stderr and "Traceback" not in result.stderr


def test_a_torchrun_without_a_shutdown_timeout_keeps_the_time_to_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.distributed import run as elastic
    from torch.distributed.elastic.multiprocessing.api import PContext

    words = ["--nproc-per-node", "2", "--shutdown-timeout", "240", "04_train_fsdp.py", "-e", "x"]
    assert torchrun.apply_shutdown_timeout(words, elastic.get_args_parser()) == words
    monkeypatch.setattr(PContext.close, "__defaults__", PContext.close.__defaults__)
    assert torchrun.apply_shutdown_timeout(words, ArgumentParser()) == words[:2] + words[4:]
    assert inspect.signature(PContext.close).parameters["timeout"].default == 240


def make_failure(code: int, timestamp: int = 0, has_reported: bool = True) -> SimpleNamespace:
    """Return a ProcessFailure of torchrun. has_reported: whether the rank wrote an error file."""
    name = signal.Signals(-code).name if code < 0 else ""
    return SimpleNamespace(
        exitcode=code,
        timestamp=timestamp,
        pid=7,
        signal_name=lambda: name,
        error_file_data={"message": {"message": "error: no room"} if has_reported else "<NONE>"},
    )


@pytest.mark.parametrize(
    ("failures", "code", "says"),
    [
        ({0: make_failure(3, 5), 1: make_failure(-signal.SIGTERM, 5)}, 3, ""),
        ({0: make_failure(2, 6), 1: make_failure(4, 5)}, 4, ""),
        (
            {1: make_failure(-signal.SIGSEGV)},
            128 + signal.SIGSEGV,
            "rank 1 (process 7) was ended by SIGSEGV",
        ),
        (
            {0: make_failure(-signal.SIGTERM)},
            128 + signal.SIGTERM,
            "rank 0 (process 7) was ended by SIGTERM",
        ),
        (
            {0: make_failure(1, 6), 1: make_failure(7, 5, has_reported=False)},
            7,
            "rank 1 (process 7) ended with exit code 7",
        ),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed_first(
    failures: dict, code: int, says: str, capsys: pytest.CaptureFixture
) -> None:
    assert torchrun.report_failures(failures) == code
    output = capsys.readouterr().err
    assert says in output and bool(output) == bool(says)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("error: no room\n  run:      df", "no room"),
        (
            "error: 2 problems:\n1. no model\n  run:  x\n2. no data",
            "no model (the first of 2 problems)",
        ),
        ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n", "KeyError: 'a'"),
        ("", ""),
    ],
)
def test_the_report_of_a_plain_torchrun_contains_the_error_of_rank_0(
    text: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For other ranks, which mostly fail alike, and for a traceback it contains one line."""
    from lib.core import launcher

    assert headline(text) == line
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank in (0, 1):
        monkeypatch.setenv("RANK", str(rank))
        launcher.record_failure("UsageError", 2, text)
        message = json.loads((tmp_path / "error.json").read_text())["message"]
        is_whole = rank == 0 and text.startswith("error: ")
        assert message["extraInfo"]["py_callstack"] == (text if is_whole else line)
        assert message["message"] == text


@pytest.mark.slow
def test_the_output_of_a_plain_torchrun_ends_with_the_error(tmp_path: Path) -> None:
    """Its report of 30 lines comes last, so the error must be repeated in it."""
    (tmp_path / "raw_text").mkdir()
    result = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", ROOT / "04_train_fsdp.py", "-e", "x", "-d", "none"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    end = result.stderr.rpartition("Root Cause")[2]
    assert "dataset none" in end and "run:" in end, result.stderr
    [printed] = re.findall(r"^error: .*?--save-dir none$", result.stderr, re.DOTALL | re.MULTILINE)
    without_rank_1 = result.stderr.replace(f"[rank=1] {printed}", "")  # unless torchrun is faster
    assert without_rank_1.count("02_build_hf_dataset.py") == 2  # where it happens, and at the end


def test_an_error_of_torchrun_itself_is_not_retried(tmp_path: Path) -> None:
    code = (
        "path = Path(os.environ['TORCHELASTIC_ERROR_FILE']); path.write_text(json.dumps("
        "{'message': {'message': 'error: torch is not installed', 'errorCode': 2, 'kind': "
        "'UsageError', 'rank': 0, 'time': 1.0}})); sys.exit(2)"
    )
    returned, output, attempts = run_launcher(tmp_path, code)
    assert (returned, len(attempts)) == (2, 1), output
    assert "torch is not installed" in output


LISTENING = f'''
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from contextlib import suppress
from pathlib import Path
from lib.parallel.layout import ParallelLayout

def listening(pid):
    """Return the addresses, in hex as the kernel has them, on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{{pid}}/fd").iterdir():
        with suppress(FileNotFoundError):
            inodes.add(os.readlink(link).removeprefix("socket:[").rstrip("]"))
    rows = [row.split() for name in ("tcp", "tcp6")
            for row in Path(f"/proc/net/{{name}}").read_text().splitlines()[1:]]
    return {{row[1].rpartition(":")[0] for row in rows if row[3] == "0A" and row[9] in inodes}}

layout = ParallelLayout.start()
layout.sum_over_ranks([1.0])
if layout.rank == 0:
    print("gloo", os.environ["GLOO_SOCKET_IFNAME"])
    print("listens", *listening(os.getpid()) | listening(os.getppid()))
layout.stop()
'''


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param(["--standalone"], marks=pytest.mark.long), []])
def test_on_one_machine_all_sockets_listen_on_loopback(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "ranks.py").write_text(LISTENING)
    options = options or ["--master-port", str(free_port())]
    result = run_torchrun(tmp_path, *options, "--nproc-per-node", "2", "ranks.py")
    assert result.returncode == 0, result.stderr
    assert "gloo lo\n" in result.stdout and "listens 0100007F\n" in result.stdout
