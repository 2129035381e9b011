# covers: Makefile, launch/cloud/kube/raw_text.py, launch/checks/slurm.py
"""Test `make` on clusters: the quick run from raw text to an export, its checks and its state."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from launch.checks import slurm as slurm_check
from tests import slurm_cluster
from tests.cloud.kube_node import Node, list_pods
from tests.cloud.kube_server import Cluster
from tests.conftest import ROOT, run_stage
from tests.make_targets import make_target
from tests.slurm_cluster import SlurmCluster

JOB = ("LAUNCHER=kubernetes", "EXP=test-quick")


@pytest.mark.long
@pytest.mark.parametrize(("kind", "nodes"), [("pytorchjob", 1), ("trainjob", 2)])
def test_a_quick_run_on_kubernetes(
    place: Path, node: Node, kube: Cluster, kind: str, nodes: int
) -> None:
    """The text, the model and the run exist only on the volume, and the export also here."""
    leftover = node.volume / "outputs" / "test-quick" / "checkpoints" / "step_00000500"
    leftover.mkdir(parents=True)
    options = " ".join((*node.options(), "--gpus-per-node 0 --poll-seconds 0.5"))
    job = (*JOB, f"KIND={kind}", f"NODES={nodes}", f"KUBERNETES={options}")
    output = make_target(place, "test-quick", *job)
    assert "test-quick    complete" in output and "exported model" in output
    for name in ("hf_datasets/test-quick", ".cache/models/test-quick", "outputs/test-quick/tb"):
        assert (node.volume / name).is_dir() and not (place / name).exists()
    AutoModelForCausalLM.from_pretrained(place / "outputs" / "test-quick" / "export" / "final")
    of_jobs = {"pytorchjob": "worker", "trainjob": "node-0"}[kind]
    assert list_pods(kube) == [
        "test-quick-prepare-x1y2z",
        *(f"test-quick-{of_jobs}-{rank}" for rank in range(nodes)),
    ]
    assert "succeeded" in make_target(place, "status", *job)
    assert "step 20/20" in make_target(place, "logs-follow", *job)
    assert "nothing to stop" in make_target(place, "stop", *job)


@pytest.fixture(scope="module")
def slurm_once() -> Iterator[SlurmCluster]:
    """Yield a cluster of two nodes, each with two GPUs in its books."""
    if reason := slurm_cluster.find_missing_tools():
        pytest.skip(reason)
    with slurm_cluster.run_cluster(nodes=2, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def slurm(slurm_once: SlurmCluster) -> Iterator[SlurmCluster]:
    """Yield the cluster without jobs and with the environment of the test."""
    for name in ("NETWORK_GUARD_REPORT", "PYTHONPATH"):
        slurm_once.environment[name] = os.environ[name]
    yield slurm_once
    slurm_once.cancel_all()


def check_slurm(slurm: SlurmCluster, folder: Path, *words: str, expect: int) -> str:
    """Run `check.py slurm`, assert its exit code and return its output."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "check.py"), "slurm", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        env=slurm.environment,
    )
    output = result.stdout + result.stderr
    assert result.returncode == expect, output
    assert "Traceback" not in output
    return output


@pytest.mark.long
def test_a_quick_run_on_slurm(place: Path, slurm: SlurmCluster) -> None:
    job = ("LAUNCHER=slurm", "EXP=test-quick", "NODES=2")
    output = make_target(place, "test-quick", *job, **slurm.environment)
    assert "test-quick    complete" in output and "exported model" in output
    AutoModelForCausalLM.from_pretrained(place / "outputs" / "test-quick" / "export" / "final")
    assert "complete" in make_target(place, "status", *job, **slurm.environment)
    assert "'global_step': 20" in make_target(place, "logs-follow", *job, **slurm.environment)
    assert "nothing to stop" in make_target(place, "stop", *job, **slurm.environment)
    output = make_target(place, "validate-setup", *job, **slurm.environment)
    assert "2 of 2 nodes of low can be used" in output and "2 ranks on 2 nodes" in output
    assert "hf_datasets/test-quick: complete" in output
    failed = make_target(place, "test-quick", *job, expect=2, **slurm.environment, SAVE_SECONDS="x")
    assert "--save-seconds: expected" in failed  # the end of the job's output


@pytest.mark.long
def test_a_slurm_cluster_is_checked_for_a_job(slurm: SlurmCluster, tmp_path: Path) -> None:
    gpus = ("--", "--gpus-per-node=2")
    output = check_slurm(slurm, tmp_path, "--nodes", "2", *gpus, expect=6)
    assert "2 ranks on 2 nodes, CPUs" in output
    assert "requests 2 GPUs per node" in output
    assert not [*tmp_path.iterdir()]  # neither probes nor outputs
    output = check_slurm(slurm, tmp_path, "--nodes", "2", "--fail-on", "warning", expect=5)
    assert "the job requests none" in output
    assert "→ --gpus-per-node=2" in output
    output = check_slurm(slurm, tmp_path, "--nodes", "3", "--", "-p", "high", expect=6)
    assert "2 of 2 nodes of high" in output and "the run needs 3" in output
    assert "ranks on" not in output  # no job after an error
    output = check_slurm(slurm, tmp_path, "--", "--partition=none", "--gres=gpu:tiny:2", expect=6)
    assert "low, low_at_once, high" in output
    output = check_slurm(slurm, tmp_path, "--", "--gres=gpu:tiny:4", expect=6)
    assert "0 of 2 nodes have tiny:4 GPUs in GRES; the run needs 1" in output
    output = check_slurm(slurm, tmp_path, "--", "--account=x", "--time=later", expect=6)
    assert "submission: " in output and "time" in output


@pytest.mark.long
def test_nodes_and_partitions_of_slurm_that_are_down_are_named(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    slurm.run("scontrol", "update", "nodename=n2", "state=drain", "reason=a broken fan")
    try:
        output = check_slurm(slurm, tmp_path, "--nodes", "2", expect=6)
        assert "n2 is DRAIN+IDLE: a broken fan" in output and "state=resume" in output
        output = check_slurm(slurm, tmp_path, "--fail-on", "warning", expect=5)
        assert "1 of 2 nodes of low can be used" in output
    finally:
        slurm.run("scontrol", "update", "nodename=n2", "state=resume")
    slurm.run("scontrol", "update", "partitionname=high", "state=down")
    try:
        assert "high is DOWN" in check_slurm(slurm, tmp_path, "--", "-phigh", expect=6)
    finally:
        slurm.run("scontrol", "update", "partitionname=high", "state=up")
    job = slurm.submit("--exclusive", "-N2", "--wrap", "sleep 600", cwd=tmp_path)
    slurm_cluster.wait_until(lambda: slurm.facts(job)["JobState"] == "RUNNING", "it runs")
    output = check_slurm(slurm, tmp_path, "--wait-minutes", "0.05", expect=0)
    assert "within 0.05 minutes" in output
    assert "0 of them now" in output


@pytest.mark.long
def test_a_directory_that_a_node_lacks_is_an_error(slurm: SlurmCluster, tmp_path: Path) -> None:
    """Here the machine of the check sees a file system that the nodes do not see."""
    inside = f'mount -t tmpfs none {tmp_path} && cd {tmp_path} && exec "$@"'
    command = [sys.executable, str(ROOT / "launch" / "check.py"), "slurm"]
    result = subprocess.run(
        ["unshare", "--mount", "bash", "-c", inside, "bash", *command],
        capture_output=True,
        text=True,
        timeout=120,
        env=slurm.environment,
    )
    assert result.returncode == 6
    assert "the current directory" in result.stdout + result.stderr


def test_without_slurm_the_check_names_a_login_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run_stage("launch/check.py", "slurm", cwd=tmp_path, expect=2)
    assert "cannot query Slurm" in result.stderr and "a login node" in result.stderr
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    monkeypatch.setenv("SBATCH_WAIT", "1")
    shown = run_stage("launch/check.py", "slurm", "--dry-run", "--", "-p", "gpu", cwd=tmp_path)
    job = "--account=mine -p gpu"
    assert f"sbatch --nodes=1 {job} --test-only" in shown.stdout
    assert f"--exclusive --mem=0 {job} --job-name=check" in shown.stdout


def test_a_cluster_without_nodes_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = "PartitionName=gpu Default=YES State=UP"
    script = f'case "$2" in partition) echo {partition};; *) echo No nodes in the system;; esac'
    for name, text in {"scontrol": script, "sbatch": "exit 1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    [first, nodes, *_] = slurm_check.check_controller([], 1)
    assert "gpu is up" in first.text and nodes.severity == "error"
    assert "0 of 0 nodes of gpu can be used" in nodes.text


def test_the_steps_of_a_quick_preparation_need_no_network(tmp_path: Path) -> None:
    run = ("--", "-d", "hf_datasets/test-quick", "-m", "test-quick")
    shown = run_stage("launch/cloud/prepare.py", "--quick", "--dry-run", *run, cwd=tmp_path).stdout
    scripts = [line.split()[2] for line in shown.splitlines() if line.startswith("$ python")]
    assert scripts == [
        "01_organize_data.py",
        "02_build_hf_dataset.py",
        "03_download_model.py",
        "04_train_fsdp.py",
    ]
    assert "--from-scratch" in shown and "/json " in shown


@pytest.mark.parametrize(
    ("line", "gpus", "usable"),
    [
        ("State=IDLE Gres=gpu:h100:8(S:0-1)", {"h100": 8}, True),
        ("State=MIXED+PLANNED Gres=gpu:8(S:0-7),nvme:2", {"": 8}, True),
        (
            "State=IDLE+CLOUD+POWERED_DOWN Gres=gpu:1g.5gb:7,gpu:4090:1",
            {"1g.5gb": 7, "4090": 1},
            True,
        ),
        ("State=IDLE* Gres=(null)", {}, False),
        ("State=DOWN Reason=Not responding [root@2026-01-01T00:00:00]", {}, False),
        ("State=ALLOCATED+DRAIN", {}, False),
    ],
)
def test_the_state_and_the_gpus_of_a_node(line: str, gpus: dict[str, int], usable: bool) -> None:
    node = slurm_check._parse_node(f"NodeName=n1 Arch=x86_64 Partitions=a,b {line}")
    assert node.gpus == gpus and node.is_usable == usable
    assert node.partitions == {"a", "b"}
    assert node.reason == ("Not responding" if "Reason" in line else "")


def test_options_of_sbatch_come_from_the_script_the_environment_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.sbatch"
    script.write_text("#SBATCH -p 'a b'\n#SBATCH --gres=gpu:2\n#SBATCH --requeue\n##SBATCH -p c\n")
    monkeypatch.setenv("SBATCH_PARTITION", "low")
    words = slurm_check.read_placement(script)
    assert words == ["-p", "a b", "--gres=gpu:2", "--partition=low"]
    assert slurm_check._find_option(words, "--partition", "-p") == "low"
    assert slurm_check._find_option([*words, "-phigh"], "--partition", "-p") == "high"
    assert slurm_check._find_gpus(words) == "2"
    assert slurm_check._find_gpus(["--gres", "gpu:h100:4"]) == "h100:4"
    assert slurm_check._find_gpus(["--gres=gpu,nvme"]) == "1"
    assert slurm_check._find_gpus(["--gpus-per-node=8", "--gres=gpu:1"]) == "8"
    assert slurm_check._find_gpus([]) == ""
