# covers: launch/cloud/pod.py
"""Test launch/cloud/pod.py as the operators start it: its rank, its command, its exit codes."""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from launch.cloud import pod
from lib.core.errors import UsageError
from tests.conftest import ROOT, free_port
from tests.node_namespaces import make_machines
from tests.training import SMALL_RUN, losses

POD = ROOT / "launch" / "cloud" / "pod.py"
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
    "BACKOFF_SECONDS": "1",
    "SAVE_SECONDS": "60",
    "WAIT_SECONDS": "120",
    "PYTHON": sys.executable,
}
TRAIN = (
    "--",
    *SMALL_RUN,
    "-e",
    "run",
    "-b",
    2,
    "--global-batch-size",
    4,
    "--ckpt-freq",
    5,
    "--eval-freq",
    0,
)
PATIENCE = 240.0


def test_a_pod_that_a_signal_has_ended_is_retried() -> None:
    """Also after a second SIGINT, since only deleting the job ends the job."""
    text = (ROOT / "launch/cloud/kube/templates/trainjob.yaml").read_text()
    [final] = re.findall(r"onExitCodes: .*values: \[([\d, ]+)\]", text)
    assert max(map(int, final.split(","))) < 128 < min(pod.EXIT_INTERRUPTED, pod._EXIT_RETRY)
    assert (
        "restartPolicy: ExitCode"
        in (ROOT / "launch/cloud/kube/templates/pytorchjob.yaml").read_text()
    )


def command(kind: str, nodes: int, *more: object) -> list[str]:
    return [
        sys.executable,
        str(POD),
        "--kind",
        kind,
        "--nnodes",
        str(nodes),
        "--nproc-per-node",
        "1",
        *map(str, more),
    ]


def wait_for(happened: Callable[[], bool], read_output: Callable[[], str]) -> None:
    until = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < until, read_output()
        time.sleep(0.1)


def has_step(root: Path, step: int) -> Callable[[], bool]:
    """Return a function that returns whether a run has logged a step."""
    metrics = root / "outputs" / "run" / "metrics.jsonl"
    return lambda: metrics.exists() and max(losses(root, "run"), default=0) >= step


@pytest.mark.parametrize(
    ("kind", "variables", "rank", "head"),
    [
        (
            "trainjob",
            {"PET_NODE_RANK": "2", "PET_MASTER_ADDR": "exp-node-0-0.exp"},
            2,
            "exp-node-0-0.exp",
        ),
        ("trainjob", {"JOB_COMPLETION_INDEX": "1", "PET_MASTER_ADDR": "a"}, 1, "a"),
        (
            "pytorchjob",
            {
                "PET_NODE_RANK": "0",
                "PET_RDZV_ENDPOINT": "exp-worker-0:23456",
                "PET_RDZV_BACKEND": "c10d",
            },
            0,
            "exp-worker-0",
        ),
    ],
)
def test_rank_and_head_come_from_the_operator(
    kind: str, variables: dict[str, str], rank: int, head: str, tmp_path: Path
) -> None:
    result = subprocess.run(
        [*command(kind, 4, "--dry-run"), "--", "-e", "run", "-d", "c"],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"--nnodes 4 --node-rank {rank} --head {head} --nproc-per-node 1" in result.stdout
    assert result.stdout.rstrip().endswith("-- -e run -d c") and str(tmp_path) in result.stdout


def test_the_rank_is_the_number_in_the_name_of_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "node", lambda: "exp-worker-12")
    assert pod.find_node_rank({}, 13) == 12
    monkeypatch.setattr(platform, "node", lambda: "laptop")
    with pytest.raises(UsageError, match="laptop"):
        pod.find_node_rank({}, 13)
    with pytest.raises(UsageError, match="address of node 0"):
        pod.find_head_address({"PET_RDZV_ENDPOINT": ""})


def test_hyperpod_and_single_nodes_use_their_own_commands() -> None:
    def read_output(*arguments: str, expect: int = 0, **variables: str) -> str:
        result = subprocess.run(
            [sys.executable, POD, *arguments, "--dry-run", "--", "-e", "x"],
            capture_output=True,
            text=True,
            env={**os.environ, **variables},
        )
        assert result.returncode == expect, result.stderr
        return result.stdout + result.stderr

    hyperpod = read_output(
        "--kind", "hyperpod", "--nnodes", "4", "--min-nodes", "2", "--nproc-per-node", "8"
    )
    assert "hyperpodrun --nnodes 2:4 --nproc-per-node 8" in hyperpod
    assert "--shutdown-signal SIGTERM --shutdown-timeout 240 " in hyperpod
    nodes = ("--nnodes", "4", "--min-nodes", "2", "--nproc-per-node", "8")
    for kind in ("hyperpod", "pytorchjob"):  # as edited in pod.yaml
        words = ("--kind", kind, *nodes)
        text = read_output(*words, SAVE_SECONDS="600", PET_RDZV_ENDPOINT="head:1")
        assert "--shutdown-timeout 600 " in text
        bad = read_output(*words, SAVE_SECONDS="2m", PET_RDZV_ENDPOINT="head:1", expect=2)
        assert "SAVE_SECONDS in the environment" in bad
    assert "single_node.sh" in read_output(
        "--kind", "trainjob", "--nnodes", "1", "--nproc-per-node", "8"
    )


def test_a_pod_waits_for_the_address_of_the_head_until_a_signal() -> None:
    variables = {**os.environ, "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "no-such-host.invalid"}
    waiting = [*command("pytorchjob", 2), "--", "-e", "x"]
    result = subprocess.run(
        waiting,
        env={**variables, "WAIT_SECONDS": "0.5"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1 and "no-such-host.invalid has no address" in result.stderr
    process = subprocess.Popen(waiting, env=variables, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    while "waiting for" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


SIGNALLED = "trap '' TERM; kill -TERM $PPID; sleep 0.5; "


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 2", 2),
        ("exit 75", 143),
        ("kill -KILL $$", 137),
        (f"{SIGNALLED} exit 75", 143),
        (f"{SIGNALLED} exit 1", 143),
        (f"{SIGNALLED} exit 4", 4),  # a full disk during the save
    ],
)
def test_exit_codes_are_as_kubernetes_expects_them(script: str, code: int) -> None:
    before = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    }
    try:
        assert pod.run_with_signals(["bash", "-c", script]) == code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.long
def test_one_pod_saves_at_sigterm_and_continues(project: Path) -> None:
    environment = {**os.environ, **ENVIRONMENT}
    train = [*command("pytorchjob", 1, *TRAIN), "--max-steps"]
    with (project / "said.txt").open("w") as output:
        process = subprocess.Popen(
            [*train, "5000"], cwd=project, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    read_output = (project / "said.txt").read_text
    wait_for(has_step(project, 3), read_output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 143, read_output()
    stopped = max(losses(project, "run"))
    second = subprocess.run(
        [*train, str(stopped + 2)],
        cwd=project,
        env=environment,
        text=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert sorted(losses(project, "run")) == list(range(1, stopped + 3))


@pytest.mark.long
def test_two_pods_stop_and_continue_together(project: Path) -> None:
    """The pods are simulated machines whose ranks are the numbers in their names."""
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PET_RDZV_ENDPOINT": "node-0:23456",
        "PET_RDZV_BACKEND": "c10d",
        "PET_NNODES": "2:2",
        "HEAD_PORT": str(free_port()),
    }

    def read_output() -> str:
        return "".join(path.read_text() for path in project.glob("said-*.txt"))

    with ExitStack() as stack:
        nodes = stack.enter_context(make_machines(2, project))

        def start(steps: int) -> list[subprocess.Popen]:
            train = command("pytorchjob", 2, *TRAIN, "--max-steps", steps)
            return [
                node.start(
                    *train, output=project / f"said-{node.name}.txt", cwd=project, env=environment
                )
                for node in nodes
            ]

        pods = start(5000)
        wait_for(has_step(project, 3), read_output)
        pods[1].send_signal(signal.SIGTERM)
        assert [process.wait(PATIENCE) for process in pods] == [143, 143], read_output()
        stopped = max(losses(project, "run"))
        assert [process.wait(PATIENCE) for process in start(stopped + 2)] == [0, 0], read_output()
    assert sorted(losses(project, "run")) == list(range(1, stopped + 3))


@pytest.mark.long
def test_an_elastic_job_continues_without_a_lost_pod(project: Path) -> None:
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PET_NNODES": "1:2",
        "PET_RDZV_ENDPOINT": f"node-0:{free_port()}",
        "PET_RDZV_BACKEND": "c10d",
    }
    train = command(
        "pytorchjob", 2, "--min-nodes", 1, *TRAIN, "--watchdog-minutes", 0.2, "--max-steps", 25
    )

    def read_output() -> str:
        return "".join(path.read_text() for path in project.glob("said-*.txt"))

    with ExitStack() as stack:
        nodes = stack.enter_context(make_machines(2, project))
        pods = [
            node.start(
                *train, output=project / f"said-{node.name}.txt", cwd=project, env=environment
            )
            for node in nodes
        ]
        wait_for(has_step(project, 6), read_output)
        nodes[1].die()
        assert pods[0].wait(PATIENCE) == 0, read_output()
    assert sorted(losses(project, "run")) == list(range(1, 26))
    assert "on 2 CPU ranks" in read_output() and "on 1 CPU rank\n" in read_output()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--nnodes", "2"), "`--` is missing"),
        (
            ("--nnodes", "2", "--min-nodes", "3", "--", "-e", "x"),
            "--min-nodes 3 is above --nnodes 2",
        ),
    ],
)
def test_bad_values_are_refused(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pod.main(["--kind", "trainjob", "--nproc-per-node", "1", *arguments])


@pytest.mark.parametrize("name", ["PET_NODE_RANK", "JOB_COMPLETION_INDEX"])
@pytest.mark.parametrize("value", ["abc", "-1", "2", "1.0", "²"])
def test_an_impossible_rank_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv("PET_MASTER_ADDR", "node-0")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=f"{name} in .* '{value}'"):
        pod.main(
            [
                *[
                    "--kind",
                    "pytorchjob",
                    "--nnodes",
                    "2",
                    "--nproc-per-node",
                    "1",
                    "--",
                    "-e",
                    "x",
                    "-d",
                    "c",
                ]
            ]
        )


@pytest.mark.parametrize("value", ["abc", "nan", "-1", ""])
def test_an_impossible_waiting_time_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WAIT_SECONDS", value)
    with pytest.raises(UsageError, match="WAIT_SECONDS in the environment"):
        pod.wait_for_address("localhost")
