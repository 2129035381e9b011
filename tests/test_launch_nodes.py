# covers: launch/supervise.py, launch/supervision/*.py
"""Test launches on several nodes: after any failure the run completes with the same losses."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.conftest import ROOT, run_stage
from tests.node_namespaces import Machine, make_machines
from tests.training import SMALL_RUN, losses

STEPS = 60
TRAIN = (
    *SMALL_RUN,
    "-e",
    "run",
    "--lr",
    "1e-2",
    "-b",
    2,
    "--ckpt-freq",
    5,
    "--eval-freq",
    0,
    "--max-steps",
    STEPS,
)
LONG = 400.0  # for a busy machine; on an idle one a test takes half a minute


@pytest.fixture(scope="module")
def expected(
    prepared_once: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], dict[int, float]]:
    """Return a function that returns the losses of an undisturbed run, by number of ranks."""

    @functools.cache
    def losses_of(ranks: int) -> dict[int, float]:
        root = tmp_path_factory.mktemp("undisturbed")
        shutil.copytree(prepared_once, root, dirs_exist_ok=True)
        run_stage("04_train_fsdp.py", *TRAIN, cwd=root, ranks=ranks)
        return losses(root, "run")

    return losses_of


class Cluster:
    """Machines that share a project, and the launchers on them."""

    def __init__(self, nodes: list[Machine], project: Path, *options: object) -> None:
        self.nodes = nodes
        self.project = project
        self._options = options
        self.launchers: list[subprocess.Popen] = [self.launch(node) for node in nodes]

    def launch(self, node: Machine) -> subprocess.Popen:
        """Start the launcher of a node."""
        rank = self.nodes.index(node)
        environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
            "BACKOFF_SECONDS": "1",
            "SAVE_SECONDS": "30",
        }
        return node.start(
            ROOT / "launch" / "multi_node.sh",
            "--nnodes",
            len(self.nodes),
            "--node-rank",
            rank,
            "--head",
            self.nodes[0].address,
            "--",
            *TRAIN,
            *self._options,
            output=self.output(rank),
            cwd=self.project,
            env=environment,
        )

    def come_back(self, rank: int) -> None:
        """Start a dead node again with the same command."""
        self.nodes[rank].mend()
        self.launchers[rank].wait()
        self.launchers[rank] = self.launch(self.nodes[rank])

    def output(self, rank: int) -> Path:
        return self.project / f"node_{rank}.txt"

    def read_output(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.project.glob("node_*.txt")))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not happened():
            assert time.monotonic() < deadline, self.read_output()
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is logged."""
        log = self.project / "outputs" / "run" / "metrics.jsonl"
        self.wait_for(lambda: log.exists() and len(log.read_text().splitlines()) >= step)

    def end(self) -> list[int]:
        """Wait for all launchers; return their exit codes, and assert that no process is left."""
        deadline = time.monotonic() + LONG
        codes = []
        for launcher in self.launchers:
            try:
                codes.append(launcher.wait(timeout=max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                pytest.fail(f"a launcher does not end\n{self.read_output()}")
        assert [node.processes() for node in self.nodes] == [{} for _ in self.nodes]
        return codes

    def state(self) -> dict:
        return json.loads((self.project / "outputs" / "run" / "state.json").read_text())

    def ends_complete(self, expected: Callable[[int], dict[int, float]]) -> None:
        assert self.end() == [0] * len(self.nodes), self.read_output()
        assert self.state()["status"] == "complete"
        assert losses(self.project, "run") == expected(len(self.nodes))
        assert not (self.project / "outputs" / ".launch").exists()


@pytest.fixture
def cluster(project: Path) -> Iterator[Callable[[int], Cluster]]:
    """Return a function that makes machines on which the run has reached step 12."""
    with ExitStack() as stack:

        def begin(number: int, *options: object) -> Cluster:
            new_cluster = Cluster(
                stack.enter_context(make_machines(number, project)), project, *options
            )
            new_cluster.wait_for_step(12)
            return new_cluster

        yield begin


@pytest.mark.long
def test_a_run_survives_a_dead_worker(cluster: Callable, expected: Callable) -> None:
    two = cluster(2)
    os.kill(two.nodes[1].ranks()[0], signal.SIGKILL)
    two.ends_complete(expected)
    assert "restart 1 of 3" in two.read_output()


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, 1], ids=["the head", "another"])
def test_a_run_survives_a_node_that_dies_and_returns(
    cluster: Callable, expected: Callable, dies: int
) -> None:
    two = cluster(2)
    two.nodes[dies].die()
    two.come_back(dies)
    two.ends_complete(expected)


@pytest.mark.long
def test_a_run_survives_a_cut_link(cluster: Callable, expected: Callable) -> None:
    two = cluster(2, "--watchdog-minutes", 0.2)
    two.nodes[1].cut()
    two.wait_for(lambda: "restart 1 of 3" in two.read_output())
    two.nodes[1].mend()
    two.ends_complete(expected)
    assert "watchdog" in two.read_output()


@pytest.mark.long
def test_three_machines_lose_a_worker_then_a_node(cluster: Callable, expected: Callable) -> None:
    three = cluster(3)
    os.kill(three.nodes[2].ranks()[0], signal.SIGKILL)
    three.wait_for(lambda: "resumed from" in three.read_output())
    three.wait_for_step(25)
    three.nodes[1].die()
    three.come_back(1)
    three.ends_complete(expected)


@pytest.mark.long
def test_a_signal_to_one_launcher_saves_and_ends_all_with_75(cluster: Callable) -> None:
    two = cluster(2)
    two.launchers[1].send_signal(signal.SIGUSR1)
    assert two.end() == [75, 75], two.read_output()
    state = two.state()
    assert state["status"] == "preempted" and state["step"] == max(state["checkpoints"])
    assert "stopped by SIGUSR1" in two.read_output()


@pytest.mark.long  # nodes that cannot agree on a save get half a minute
def test_a_signal_when_the_link_is_cut_ends_all_with_75_too(cluster: Callable) -> None:
    two = cluster(2)
    two.nodes[1].cut()
    two.launchers[0].send_signal(signal.SIGTERM)
    assert two.end() == [75, 75], two.read_output()


def single_node(project: Path, *options: object) -> subprocess.Popen:
    """Start two ranks on this machine."""
    command = [ROOT / "launch" / "single_node.sh", "--nproc-per-node", 2, "--", *TRAIN, *options]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=project,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "-1",
        },
    )


@pytest.mark.slow
def test_bad_input_on_one_machine_is_not_retried(project: Path) -> None:
    process = single_node(project, "-d", "nothing")
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 3, output
    assert "restart" not in output.replace("at most 3 restarts", "").replace("-restarts", "")
    assert "exit code 3: rank" in output and "dataset nothing" in output


@pytest.mark.long
def test_a_stopped_run_on_one_machine_continues(project: Path, expected: Callable) -> None:
    process = single_node(project)
    log = project / "outputs" / "run" / "metrics.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) >= 12):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 75 and "stopped by SIGTERM" in output, output
    process = single_node(project)
    output = process.communicate(timeout=LONG)[0]
    assert process.returncode == 0 and losses(project, "run") == expected(2), output


@pytest.mark.parametrize(
    ("host", "interface"),
    [("10.77.0.1", "eth0"), ("10.77.0.2", "eth0"), ("node-1", "eth0"), ("node-0", "")],
)
def test_the_interface_is_that_of_the_route_to_the_head(
    tmp_path: Path, host: str, interface: str
) -> None:
    """On node 0 its own name is a loopback address, and there is no default route."""
    program = (
        "import sys; from launch.supervision import network; "
        "print(network.interface_variables(sys.argv[1], ''))"
    )
    with make_machines(2, tmp_path) as [node, _]:
        node.start(
            sys.executable, "-c", program, host, output=tmp_path / "said.txt", cwd=ROOT
        ).wait(timeout=60)
    expected = f"{{'GLOO_SOCKET_IFNAME': '{interface}'}}" if interface else "{}"
    assert (tmp_path / "said.txt").read_text().strip() == expected
