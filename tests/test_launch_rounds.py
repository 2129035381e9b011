# covers: launch/supervision/*.py
"""Test that launchers of several nodes agree through a shared directory; a stand-in trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from launch.supervision.attempt import NodeCommand
from launch.supervision.board import NoteBoard
from launch.supervision.end_command import EndCommand
from launch.supervision.head import Head
from lib.core.paths import Experiment
from tests.trainer_stand_in import COMPLETE, KILLED, find_processes, read_attempts, start_launcher

WAITS = "print('up', flush=True); time.sleep(600)"


def start_node(
    folder: Path, node: int, *plan: str, nodes: int = 2, wait: float = 60, arguments: tuple = ()
) -> subprocess.Popen:
    """Start the launcher of one node."""
    options = (
        "--nnodes",
        nodes,
        "--node-rank",
        node,
        "--head",
        "127.0.0.1",
        "--wait-seconds",
        wait,
    )
    return start_launcher(folder, *plan, node=node, options=options, arguments=arguments)


def wait_for_launchers(*launchers: subprocess.Popen) -> tuple[list[int], str]:
    """Wait for all launchers, and return their exit codes and outputs."""
    outputs = [launcher.communicate(timeout=150)[0] for launcher in launchers]
    return [launcher.returncode for launcher in launchers], "\n".join(outputs)


def wait_until_up(*launchers: subprocess.Popen) -> None:
    """Wait until the trainers of these launchers run."""
    for launcher in launchers:
        while (line := launcher.stdout.readline()) != "up\n":
            assert line, launcher.poll()


@pytest.mark.long  # the other node has 20 seconds to end by itself
def test_all_nodes_end_with_the_code_of_the_failed_rank(tmp_path: Path) -> None:
    codes, output = wait_for_launchers(
        start_node(tmp_path, 0, WAITS),
        start_node(tmp_path, 1, "fail('ArtifactError', 3, 'error: damaged')"),
    )
    assert codes == [3, 3] and "rank 1 on node 1: damaged" in output, output
    assert not find_processes(str(tmp_path)) and not (tmp_path / "outputs" / ".launch").exists()


@pytest.mark.slow
def test_a_lost_worker_begins_a_new_round_on_all_nodes(tmp_path: Path) -> None:
    plan = ("fail('StageError', 1, 'error: the connection to another rank broke')", COMPLETE)
    codes, output = wait_for_launchers(
        start_node(tmp_path, 0, *plan, nodes=3, arguments=("--overwrite",)),
        start_node(tmp_path, 1, *plan, nodes=3, arguments=("--overwrite",)),
        start_node(tmp_path, 2, KILLED, COMPLETE, nodes=3, arguments=("--overwrite",)),
    )
    assert codes == [0, 0, 0], output
    for node in range(3):
        first, second = read_attempts(tmp_path, node)
        assert first == second and first.endswith("--overwrite")


@pytest.mark.long
@pytest.mark.parametrize("dies", [0, 1])
def test_a_node_that_dies_may_return(tmp_path: Path, dies: int) -> None:
    nodes = [start_node(tmp_path, node, WAITS, COMPLETE) for node in (0, 1)]
    wait_until_up(*nodes)
    nodes[dies].kill()
    nodes[dies].wait()
    nodes[dies] = start_node(tmp_path, dies, COMPLETE)
    codes, output = wait_for_launchers(*nodes)
    assert codes == [0, 0], output
    assert not find_processes(str(tmp_path))


@pytest.mark.long
def test_a_node_that_is_done_early_waits_for_the_others(tmp_path: Path) -> None:
    """As with --prepare-only, when one machine has more to prepare."""
    codes, output = wait_for_launchers(
        start_node(tmp_path, 0, "time.sleep(30); sys.exit(0)"),
        start_node(tmp_path, 1, "sys.exit(0)"),
    )
    assert codes == [0, 0] and len(read_attempts(tmp_path)) == 1, output
    (tmp_path / "attempts_0.txt").unlink()
    codes, output = wait_for_launchers(
        start_node(tmp_path, 0, "sys.exit(0)"),
        start_node(tmp_path, 1, "time.sleep(30); sys.exit(0)"),
    )
    assert codes == [0, 0] and len(read_attempts(tmp_path)) == 1, output


@pytest.mark.slow
@pytest.mark.parametrize("node", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_a_second_sigint_to_any_node_ends_all_without_a_save(tmp_path: Path, node: int) -> None:
    """One SIGINT to each of two nodes stops the run normally, and the ranks of a third node too."""
    saves = "signal.signal(signal.SIGINT, lambda *_: None); " + WAITS + "; " + WAITS
    nodes = [start_node(tmp_path, number, saves, nodes=3) for number in range(3)]
    wait_until_up(*nodes)
    for launcher in (nodes[node], nodes[node - 1]):
        launcher.send_signal(signal.SIGINT)
    time.sleep(3)
    assert [launcher.poll() for launcher in nodes] == [None] * 3
    nodes[node].send_signal(signal.SIGINT)
    codes, output = wait_for_launchers(*nodes)
    assert codes == [130] * 3, output
    assert "a second SIGINT" in output
    assert f"node {node} received a second SIGINT" in output
    assert not find_processes(str(tmp_path / "04_train")) and "exit code 75" not in output


def test_a_signal_ends_launchers_that_wait_for_nodes(tmp_path: Path) -> None:
    head = start_node(tmp_path, 0, COMPLETE)
    head.stdout.readline()
    board = tmp_path / "outputs/.launch/run/node_00000.json"
    deadline = time.monotonic() + 60
    while not board.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    head.send_signal(signal.SIGTERM)
    codes, output = wait_for_launchers(head)
    assert codes == [143] and not (tmp_path / "attempts_0.txt").exists(), output
    assert "nothing to save" in output


def test_a_node_that_never_comes_is_named(tmp_path: Path) -> None:
    codes, output = wait_for_launchers(start_node(tmp_path, 0, COMPLETE, wait=2))
    assert codes == [1] and "nodes [1] did not" in output
    codes, output = wait_for_launchers(start_node(tmp_path, 1, COMPLETE, wait=2))
    assert codes == [1] and "node 0 is gone" in output


@pytest.mark.slow
def test_the_same_number_on_two_machines_is_refused(tmp_path: Path) -> None:
    first = start_node(tmp_path, 1, COMPLETE)
    board = tmp_path / "outputs/.launch/run/node_00001.json"
    deadline = time.monotonic() + 60
    while not board.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    codes, output = wait_for_launchers(start_node(tmp_path, 1, COMPLETE))
    assert codes == [2] and "at work as node 1" in output
    assert wait_for_launchers(first, start_node(tmp_path, 0, COMPLETE))[0] == [0, 0]


@pytest.mark.long
def test_notes_of_a_killed_launch_are_harmless(tmp_path: Path) -> None:
    nodes = [start_node(tmp_path, node, WAITS) for node in (0, 1)]
    wait_until_up(*nodes)
    for node in nodes:
        node.kill()
    wait_for_launchers(*nodes)
    assert json.loads((tmp_path / "outputs/.launch/run/node_00000.json").read_text())["me"]
    for pid in find_processes(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    codes, output = wait_for_launchers(
        start_node(tmp_path, 1, COMPLETE), start_node(tmp_path, 0, COMPLETE)
    )
    assert codes == [0, 0], output
    killed, new = read_attempts(tmp_path, 0)
    assert killed != new  # by the mark, the new launch overwrites the run as it was told


@pytest.mark.parametrize("node", [0, 1])
def test_a_shared_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, node: int):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs/.launch").touch()
    codes, output = wait_for_launchers(start_node(tmp_path, node, COMPLETE, wait=600))
    assert codes == [2] and "outputs/.launch/run, which cannot" in output, output
    assert "Not a directory" in output and "--save-dir" in output


RUBBISH = [
    "[]",
    "{",
    '{"round": "x"}',
    '{"round": null, "members": 3}',
    '{"phase": "run", "beat": 1}',
    '{"me": "a", "beat": 1, "phase": "leave", "round": 1, "stop": "", "gave_up": false}',
]


@pytest.mark.parametrize("text", RUBBISH)
def test_an_invalid_note_is_ignored(tmp_path: Path, text: str) -> None:
    directory = tmp_path / "board"
    directory.mkdir()
    for node in (0, 1):
        (directory / f"node_{node:05d}.json").write_text(text)
    experiment = Experiment(tmp_path, "e")
    command = NodeCommand([], {}, 1)
    end_command = EndCommand("", 1.0, experiment)
    head = Head(command, NoteBoard(directory, 0), 1, 2, experiment, 0, 0, end_command)
    assert head.round == 0
    assert NoteBoard(directory, 1).read(0) == {}


@pytest.mark.slow
def test_launchers_meet_despite_invalid_notes(tmp_path: Path) -> None:
    board = tmp_path / "outputs/.launch/run"
    board.mkdir(parents=True)
    for node in (0, 1):
        (board / f"node_{node:05d}.json").write_text('{"phase": "run", "round": null}')
    codes, output = wait_for_launchers(
        start_node(tmp_path, 1, COMPLETE), start_node(tmp_path, 0, COMPLETE)
    )
    assert codes == [0, 0], output
