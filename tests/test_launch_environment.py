# covers: launch/multi_node.sh, launch/single_node.sh, launch/supervise.py
"""Test launches whose nodes are described by the variables that users of torchrun export."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, free_port

MULTI = ROOT / "launch" / "multi_node.sh"
SINGLE = ROOT / "launch" / "single_node.sh"
TRAIN = ("--", "-e", "run", "-d", "corpus")
# A stand-in for stage 04: all ranks sum their ranks.
SUM = """
import os
from pathlib import Path
from torch import distributed, tensor

distributed.init_process_group("gloo")
total = tensor(distributed.get_rank())
distributed.all_reduce(total)
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}, sum {total.item()}", flush=True)
distributed.destroy_process_group()
"""


def run_launcher(script: Path, *options: str, cwd: Path, **variables: str) -> subprocess.Popen:
    """Start a launcher in an environment with these variables and no others for the nodes."""
    names = ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "WORLD_SIZE", "RANK", "LOCAL_RANK")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(("PET_", "MASTER_", "HEAD_"))
    }
    return subprocess.Popen(
        ["bash", script, *options],
        cwd=cwd,
        env={
            **environment,
            "PYTHON": sys.executable,
            "CUDA_VISIBLE_DEVICES": "-1",
            "OMP_NUM_THREADS": "1",
            **variables,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def print_plan(*options: str, cwd: Path, expect: int = 0, **variables: str) -> str:
    """Return what multi_node.sh prints as its dry run."""
    launcher = run_launcher(MULTI, *options, "--dry-run", *TRAIN, cwd=cwd, **variables)
    output = launcher.communicate(timeout=60)[0]
    assert launcher.returncode == expect, output
    return output


@pytest.mark.parametrize("prefix", ["", "PET_"])
def test_the_variables_of_torchrun_describe_the_node(tmp_path: Path, prefix: str) -> None:
    variables = {
        "NNODES": "3",
        "NODE_RANK": "2",
        "MASTER_ADDR": "127.0.0.9",
        "MASTER_PORT": "1234",
        "NPROC_PER_NODE": "5",
    }
    text = print_plan(cwd=tmp_path, **{prefix + name: value for name, value in variables.items()})
    assert "--nnodes 3 --node-rank 2 --master-addr 127.0.0.9 --master-port 1234" in text
    assert "--nproc-per-node 5 " in text and "replaces" not in text


def test_options_of_torchrun_name_the_head_as_well(tmp_path: Path) -> None:
    words = "--nnodes=2 --node_rank 1 --master_addr=127.0.0.9 --master-port 77 --nproc_per_node=2"
    text = print_plan(*words.split(), cwd=tmp_path)
    assert "--nnodes 2 --node-rank 1 --master-addr 127.0.0.9 --master-port 77" in text
    assert "--nproc-per-node 2 " in text


def test_an_option_replaces_its_variable_and_says_so(tmp_path: Path) -> None:
    text = print_plan(
        *("--nnodes", "4", "--head", "127.0.0.3"),
        cwd=tmp_path,
        NNODES="2",
        PET_NNODES="1:4",
        NODE_RANK="1",
        MASTER_ADDR="127.0.0.1",
        HEAD_ADDR="127.0.0.3",
    )
    assert "--nnodes 4 --node-rank 1 --master-addr 127.0.0.3 --master-port 29500" in text
    assert "--nnodes 4 replaces NNODES=2" in text and "--nnodes 4 replaces PET_NNODES=1:4" in text
    assert "--head 127.0.0.3 replaces MASTER_ADDR=127.0.0.1" in text and "HEAD_ADDR" not in text


def test_all_contradictory_variables_are_named(tmp_path: Path) -> None:
    text = print_plan(
        cwd=tmp_path,
        expect=2,
        NNODES="2",
        NODE_RANK="one",
        MASTER_ADDR="10.0.0.1",
        HEAD_ADDR="10.0.0.2",
        MASTER_PORT="1234",
        PET_MASTER_PORT="29400",
    )
    assert "MASTER_ADDR=10.0.0.1 and HEAD_ADDR=10.0.0.2" in text
    assert "MASTER_PORT=1234 and PET_MASTER_PORT=29400" in text and "--port is not given" in text
    assert "NODE_RANK=one in the environment" in text
    assert "launcher:" not in text


def test_a_range_of_nodes_is_refused(tmp_path: Path) -> None:
    text = print_plan(
        cwd=tmp_path, expect=2, PET_NNODES="1:4", NODE_RANK="0", MASTER_ADDR="10.0.0.1"
    )
    assert "PET_NNODES=1:4 in the environment" in text


def test_ambiguous_variables_are_not_read(tmp_path: Path) -> None:
    text = print_plan(cwd=tmp_path, expect=2, WORLD_SIZE="4", RANK="1", MASTER_ADDR="10.0.0.1")
    assert "WORLD_SIZE=4 is not read" in text
    assert "RANK=1 is not read" in text
    assert "--nnodes: expected" in text and "--node-rank: expected" in text
    assert "[rank" not in text


def test_a_missing_head_names_the_variable(tmp_path: Path) -> None:
    text = print_plan(cwd=tmp_path, expect=2, NNODES="2", NODE_RANK="0")
    assert "--head is missing" in text and "MASTER_ADDR" in text


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a project with our launchers and a stand-in for stage 04."""
    for name in ("launch", "lib"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "04_train_fsdp.py").write_text(SUM)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_nodes_meet_by_variables_alone(place: Path, nodes: int) -> None:
    """Variables that an agent or another launch left behind do not keep the ranks apart."""
    leftovers = {
        "PET_RDZV_ENDPOINT": "127.0.0.1:1",
        "PET_RDZV_BACKEND": "c10d",
        "PET_STANDALONE": "1",
        "WORLD_SIZE": "64",
        "RANK": "63",
    }
    port = str(free_port())
    launchers = [
        run_launcher(
            place / "launch" / "multi_node.sh",
            *TRAIN,
            cwd=place,
            NNODES=str(nodes),
            NODE_RANK=str(node),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            NPROC_PER_NODE="1",
            **leftovers,
        )
        for node in range(nodes)
    ]
    outputs = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    total = sum(range(nodes))
    for node, output in enumerate(outputs):
        assert f"rank {node} of {nodes}, sum {total}" in output, output


@pytest.mark.slow
def test_a_single_node_ignores_what_describes_several(place: Path) -> None:
    launcher = run_launcher(
        place / "launch" / "single_node.sh",
        *TRAIN,
        cwd=place,
        NPROC_PER_NODE="2",
        PET_NNODES="4",
        PET_RDZV_ENDPOINT="127.0.0.1:1",
        RANK="3",
    )
    output = launcher.communicate(timeout=300)[0]
    assert "rank 1 of 2, sum 1" in output, output
