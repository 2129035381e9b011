# covers: 04_train_fsdp.py, lib/checkpoints/tier.py
"""`--ckpt-local-dir`: frequent checkpoints on each node's own disk, besides the shared ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forks
from tests.conftest import ROOT, free_port, run_stage, start_stage
from tests.training import SMALL_RUN, list_saved_steps, losses

STEPS = 40
COMMON = (
    *SMALL_RUN,
    "-b",
    2,
    "--lr",
    "1e-2",
    "--eval-freq",
    0,
    "--ckpt-freq",
    20,
    "--max-steps",
    STEPS,
)
LOCAL = (*COMMON, "-e", "run")  # local checkpoints every 2 steps


def start_nodes(project: Path) -> list[forks.Launch]:
    """Start stage 04 as two nodes of one rank, each with a disk of its own."""
    return [
        start_stage(
            "04_train_fsdp.py",
            *LOCAL,
            "--ckpt-local-dir",
            f"disk_{node}",
            cwd=project,
            output=project / "printed",
            env={**variables, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(node)},
        )
        for node, variables in enumerate(forks.rank_variables(2, free_port()))
    ]


def resume_nodes(project: Path, expect: int = 0) -> str:
    """Run both nodes to their end and return their output."""
    (project / "printed").unlink(missing_ok=True)
    codes = [node.wait(300)[0] for node in start_nodes(project)]
    assert codes == [expect, expect], (project / "printed").read_text()
    return (project / "printed").read_text()


def resumed_from(project: Path) -> tuple[str, int]:
    """Return the directory of the last resume, and its step."""
    lines = (project / "outputs/run/events.jsonl").read_text().splitlines()
    event = [e for e in map(json.loads, lines) if e["event"] == "resume"][-1]
    return event["path"].partition("/")[0], event["step"]


def local_steps(project: Path, node: int) -> list[int]:
    """Return the steps on a node's own disk, newest first."""
    return sorted(
        (int(path.name[5:]) for path in project.glob(f"disk_{node}/run-*/step_????????")),
        reverse=True,
    )


def steps_on_both(project: Path) -> list[int]:
    return sorted(set(local_steps(project, 0)) & set(local_steps(project, 1)), reverse=True)


@pytest.fixture(scope="module")
def once(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with an undisturbed run, and one of two nodes that were killed."""
    root = tmp_path_factory.mktemp("local")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", *COMMON, "-e", "plain", cwd=root, ranks=2)
    nodes = start_nodes(root)
    while max([0, *steps_on_both(root)]) <= 22:
        assert not any(node.poll() for node in nodes), (root / "printed").read_text()
        time.sleep(0.01)
    for node in nodes:
        node.kill()
    return root


@pytest.fixture
def run(once: Path, tmp_path: Path) -> Path:
    shutil.copytree(once, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_a_resume_uses_the_newest_checkpoint_and_gives_the_same_losses(run: Path) -> None:
    newest = steps_on_both(run)[0]
    verify = [sys.executable, "-m", "lib.checkpoints", "verify", next(run.glob("disk_1/run-*"))]
    done = subprocess.run(verify, cwd=ROOT, capture_output=True, text=True, timeout=100, check=True)
    assert " valid\n" in done.stdout
    resume_nodes(run)
    assert resumed_from(run) == ("disk_0", newest)
    assert losses(run, "run") == losses(run, "plain")
    assert list_saved_steps(run, "run") == [20, STEPS]
    assert not local_steps(run, 0) + local_steps(run, 1), (
        "a complete run does not need them any more"
    )


@pytest.mark.long
@pytest.mark.parametrize("harm", ["a bit", "a missing file", "a node's disk", "another run"])
def test_a_checkpoint_that_is_incomplete_on_a_node_is_not_used(run: Path, harm: str) -> None:
    newest, *older = steps_on_both(run)
    step = next(run.glob(f"disk_1/run-*/step_{newest:08d}"))
    expected = ("disk_0", older[0]) if older else ("outputs", 20)
    if harm == "a bit":
        file = next(step.glob("dcp/rank_00001/*.distcp"))
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif harm == "a missing file":
        (step / "dcp/rank_00001/.metadata").unlink()
    elif harm == "a node's disk":
        shutil.rmtree(run / "disk_1")
        expected = ("outputs", 20)
    else:
        config = run / "outputs/run/config.yaml"
        config.write_text(config.read_text().replace("\nrun: ", "\nrun: x"))
        expected = ("outputs", 20)
    resume_nodes(run)
    assert resumed_from(run) == expected
    assert losses(run, "run") == losses(run, "plain")


@pytest.mark.long
def test_another_number_of_ranks_uses_the_shared_checkpoint(run: Path) -> None:
    run_stage("04_train_fsdp.py", *LOCAL, "--ckpt-local-dir", "disk_0", "-b", 4, cwd=run)
    assert resumed_from(run) == ("outputs", 20)


@pytest.mark.long
def test_a_local_checkpoint_is_used_if_no_shared_one_is_valid(run: Path) -> None:
    (run / "outputs/run/checkpoints/step_00000020/COMMIT.json").unlink()
    newest = steps_on_both(run)[0]
    resume_nodes(run)
    assert resumed_from(run) == ("disk_0", newest)
    assert losses(run, "run") == losses(run, "plain")


def test_a_disk_that_cannot_be_written_is_refused(project: Path) -> None:
    (project / "disk_1").touch()
    printed = resume_nodes(project, expect=2)
    assert "--ckpt-local-dir: disk_1/run-" in printed and "cannot be written" in printed
