# covers: launch/torchrun.py, launch/supervise.py, launch/cloud/pod.py
"""Test signals to all launchers: many signals cause one save, a second SIGINT none."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import slurm_cluster
from tests.conftest import ROOT, free_port
from tests.slurm_cluster import wait_until

# A stand-in for stage 04: after one or more signals it saves once and exits with 75.
RANK = """
import json, os, signal, sys, time
from pathlib import Path

root, stops = Path("outputs/run"), []
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: stops.append(number))
(root / "checkpoints/step_00000007").mkdir(parents=True, exist_ok=True)
(root / "state.json").write_text(json.dumps({"status": "running", "step": 9}))
Path("ready").touch()
while not stops:
    time.sleep(0.02)
time.sleep(float(Path("save_seconds").read_text()))
Path("saved").write_text(str(stops))
(root / "state.json").write_text(json.dumps({"status": "preempted", "step": 9}))
sys.exit(75)
"""
TRAIN = ("--", "-e", "run", "-d", "corpus")
ENVIRONMENT = {
    "PYTHON": sys.executable,
    "CUDA_VISIBLE_DEVICES": "-1",
    "OMP_NUM_THREADS": "1",
    "NPROC_PER_NODE": "1",
}
POD = ("cloud/pod.py", "--kind", "trainjob", "--nproc-per-node", "1", "--nnodes")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "single_node.sh": ("single_node.sh", *TRAIN),
    "multi_node.sh": (
        "multi_node.sh",
        "--nnodes",
        "1",
        "--node-rank",
        "0",
        "--head",
        "localhost",
        *TRAIN,
    ),
    "torchrun.py": (
        "torchrun.py",
        "--standalone",
        "--nproc-per-node",
        "1",
        "--max-restarts",
        "0",
        "--signals-to-handle",
        "SIGTERM,SIGINT,SIGUSR1",
        "--shutdown-timeout",
        "60",
        "04_train_fsdp.py",
        *TRAIN[1:],
    ),
    "pod.py": (*POD, "1", *TRAIN),
    "pod.py --min-nodes": (
        *POD,
        "2",
        "--min-nodes",
        "1",
        *TRAIN,
    ),  # a pod waits half a minute for another one
}
CASES = [
    pytest.param(name, marks=[] if name == "single_node.sh" else pytest.mark.slow)
    for name in LAUNCHERS
]
LONG_CASE = pytest.param("pod.py --min-nodes", marks=pytest.mark.long)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a project with our launchers and a stand-in for stage 04."""
    for name in ("launch", "lib"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "04_train_fsdp.py").write_text(RANK)
    return tmp_path


def start_launcher(place: Path, name: str, save_seconds: float) -> subprocess.Popen:
    """Start a launcher and return it once its rank is ready for signals."""
    script, *words = LAUNCHERS[name]
    (place / "save_seconds").write_text(str(save_seconds))
    program = ["bash"] if script.endswith(".sh") else [sys.executable]
    variables = {"PET_RDZV_ENDPOINT": f"localhost:{free_port()}", "PET_NODE_RANK": "0"}
    process = subprocess.Popen(
        [*program, str(place / "launch" / script), *words],
        cwd=place,
        text=True,
        env={**os.environ, **ENVIRONMENT, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (place / "ready").exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0]
        time.sleep(0.05)
    return process


def saved_code(name: str, first: signal.Signals) -> int:
    """Return a launcher's exit code after a save; torchrun's own is that of a signal."""
    if name == "torchrun.py":
        return 128 + first
    return 143 if name.startswith("pod.py") else 75


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM, signal.SIGINT),
        pytest.param(
            (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGTERM), marks=pytest.mark.long
        ),
        pytest.param((signal.SIGINT, signal.SIGTERM, signal.SIGUSR1), marks=pytest.mark.long),
    ],
)
def test_several_signals_save_once(
    place: Path, name: str, signals: tuple[signal.Signals, ...]
) -> None:
    process = start_launcher(place, name, save_seconds=3)
    for number in signals:
        process.send_signal(number)
        time.sleep(0.4)
    output = process.communicate(timeout=60)[0]
    assert (place / "saved").exists(), output
    assert process.returncode == saved_code(name, signals[0]), output
    assert "killed without a save" not in output


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES[:-1], LONG_CASE])
@pytest.mark.parametrize("before", [(), pytest.param((signal.SIGTERM,), marks=pytest.mark.long)])
def test_a_second_sigint_kills_the_ranks_and_promises_no_save(
    place: Path, name: str, before: tuple[signal.Signals, ...]
) -> None:
    process = start_launcher(place, name, save_seconds=300)
    for number in (*before, signal.SIGINT, signal.SIGINT):
        process.send_signal(number)
        time.sleep(0.8)
    output = process.communicate(timeout=60)[0]
    assert not (place / "saved").exists(), output
    expected = 128 + (before[0] if before and name == "torchrun.py" else signal.SIGINT)
    assert process.returncode == expected, output
    assert "a second SIGINT" in output
    assert "step 7 is lost" in output or (
        name in ("torchrun.py", "pod.py --min-nodes") and "is lost" in output
    )
    assert json.loads((place / "outputs/run/state.json").read_text())["status"] == "running"


@pytest.mark.slow
def test_one_ctrl_c_in_the_terminal_of_a_pod_saves(place: Path) -> None:
    """All processes of the terminal receive it, and pod.py passes it on as well."""
    process = start_launcher(place, "pod.py", save_seconds=3)
    os.killpg(process.pid, signal.SIGINT)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 143 and (place / "saved").exists(), output


@pytest.mark.slow
def test_signals_of_slurm_save_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm signals the steps with their ranks, and also the batch script."""
    if reason := slurm_cluster.find_missing_tools():
        pytest.skip(reason)
    (place / "save_seconds").write_text("3")
    monkeypatch.chdir(place)
    with slurm_cluster.run_cluster(nodes=1) as cluster:
        cluster.environment |= ENVIRONMENT
        job = cluster.submit("launch/slurm.sbatch", *TRAIN[1:], cwd=place)
        wait_until((place / "ready").exists, "the rank is ready")
        for options in (("--signal=TERM",), ("--signal=INT", "--full")):
            cluster.run("scancel", *options, job)
            time.sleep(0.5)
        wait_until((place / "saved").exists, "the rank has saved")
        assert cluster.wait_for_end(job)["ExitCode"] == "75:0"
        assert "stopped and saved" in (place / f"slurm-{job}.out").read_text()
