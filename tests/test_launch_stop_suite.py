# covers: launch/torchrun.py, launch/supervise.py, launch/cloud/pod.py, lib/evaluate/scoring.py
"""Test that every launcher saves within seconds if a signal comes during a long evaluation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT, free_port, kill_all, wait_until
from tests.node_namespaces import make_machines
from tests.training import SMALL_RUN, list_saved_steps, metrics

LINES = 60_000  # a suite that takes many minutes
TRAIN = (
    *SMALL_RUN,
    *("-e", "run", "-b", 2, "--eval-freq", 2, "--ckpt-freq", 5000, "--max-steps", 5000),
    *("--eval-suite", "suite", "--eval-batches", 1),
)
SINGLE = ("bash", ROOT / "launch/single_node.sh", "--nproc-per-node")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
POD = (sys.executable, ROOT / "launch/cloud/pod.py", "--kind", "pytorchjob", "--nnodes", 1)
NODE = ("bash", ROOT / "launch/multi_node.sh", "--nproc-per-node", 1, "--nnodes")
CODES = {  # exit codes after a save; Kubernetes starts a pod again that was ended by a signal
    "single_node.sh": 75,
    "torchrun": 1,
    "multi_node.sh": 75,
    "slurm": 75,
    "pod.py": 143,
}
ENVIRONMENT = {
    "PYTHON": sys.executable,
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "SAVE_SECONDS": "120",
}


@pytest.fixture
def place(project: Path) -> Path:
    (project / "suite").mkdir()
    words = "kalo mi ru se lota " * 8
    rows = [{"context": f"{words}{n}", "answer": " kan lova rux se mi kata"} for n in range(LINES)]
    (project / "suite/long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return project


def start_launchers(
    place: Path, launcher: str, ranks: int, stack: ExitStack
) -> list[subprocess.Popen]:
    """Start the launchers of a run: one, or one for each rank on a node of its own."""
    environment = {**os.environ, **ENVIRONMENT}
    if launcher in ("multi_node.sh", "slurm"):
        nodes = stack.enter_context(make_machines(ranks, place))
        port = free_port()
        return [
            node.start(
                *(*NODE, ranks),
                *("--node-rank", rank, "--head", nodes[0].address, "--port", port),
                *("--", *TRAIN),
                output=place / "printed",
                cwd=place,
                env=environment,
            )
            for rank, node in enumerate(nodes)
        ]
    command = {
        "torchrun": (*TORCHRUN, ranks, ROOT / "04_train_fsdp.py", *TRAIN),
        "single_node.sh": (*SINGLE, ranks, "--", *TRAIN),
        "pod.py": (*POD, "--nproc-per-node", ranks, "--", *TRAIN),
    }[launcher]
    with (place / "printed").open("ab") as file:
        process = subprocess.Popen(
            [*map(str, command)], cwd=place, env=environment, stdout=file, stderr=file
        )
    stack.callback(kill_all, process, place)
    return [process]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "ranks", "code"),
    [
        pytest.param(
            *(launcher, ranks, code),
            marks=[] if (launcher, ranks) == ("single_node.sh", 2) else pytest.mark.long,
        )
        for launcher, code in CODES.items()
        for ranks in (1, 2, 3)
    ],
)
def test_a_signal_during_a_suite_saves_the_step_before_it(
    place: Path, launcher: str, ranks: int, code: int
) -> None:
    """On several nodes only the last one is signalled, by Slurm all are."""
    rows = place / "outputs/run/metrics.jsonl"
    with ExitStack() as stack:
        launchers = start_launchers(place, launcher, ranks, stack)
        wait_until(lambda: (rows.exists() and rows.read_text()) or launchers[0].poll() is not None)
        time.sleep(5)  # step 2 takes a moment
        stopped_at = time.monotonic()
        for process in launchers if launcher == "slurm" else launchers[-1:]:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(200) for process in launchers]
        seconds = time.monotonic() - stopped_at
    printed = (place / "printed").read_text()
    assert codes == [code] * len(launchers), printed
    last = metrics(place, "run")[-1]["step"]
    assert last == 2, "the first step with an evaluation"
    assert list_saved_steps(place, "run") == [last], printed
    assert json.loads((place / "outputs/run/state.json").read_text())["status"] == "preempted"
    assert seconds < 60, "of which the suite would take many minutes"
