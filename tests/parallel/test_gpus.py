# covers: lib/parallel/gpus.py, lib/core/nvidia.py
"""The error contains torch's reason why it cannot use GPUs. All tools are fakes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launch.checks import machine, node_findings, setup
from lib.core import nvidia
from lib.core.errors import UsageError
from lib.parallel import gpus
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH

SMI = """#!/bin/sh
case "$*" in
*query-gpu=name*) printf 'NVIDIA A100\\nNVIDIA A100\\n';;
*query-gpu=driver_version*) printf '535.104.05\\n535.104.05\\n';;
*) exit 1;;
esac
"""
Node = Callable[..., None]


def put_smi(folder: Path) -> None:
    """Put a nvidia-smi that lists two GPUs on the PATH of this process."""
    folder.mkdir(exist_ok=True)
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    """Return a function that fakes a machine with files, and a torch that finds no GPU there."""

    def fake_machine(
        smi: bool = True,
        files: int = 2,
        driver: str = "",
        version: str = "2.13.0+cu126",
        cuda: str | None = "12.6",
        visible: str | None = None,
        error: str = "",
    ) -> None:
        for name in ("dev", "proc"):
            (tmp_path / name).mkdir()
        for number in range(files):
            (tmp_path / "dev" / f"nvidia{number}").touch()
        if driver:
            (tmp_path / "proc" / "gpus" / "0000:53:00.0").mkdir(parents=True)
            (tmp_path / "proc" / "version").write_text(
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  "
                f"{driver}  Release Build\nGCC version: gcc version 12.3.0\n"
            )
        if smi:
            put_smi(tmp_path / "bin")
        monkeypatch.setattr(nvidia, "DEV", tmp_path / "dev")
        monkeypatch.setattr(nvidia, "PROC", tmp_path / "proc")
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(torch.version, "cuda", cuda)

        def init() -> None:
            if error:
                raise RuntimeError(error)

        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return fake_machine


@pytest.mark.parametrize(
    ("machine_facts", "problem"),
    [
        ({"version": "2.13.0+cpu", "cuda": None}, "torch 2.13.0+cpu is built without CUDA"),
        ({"visible": "7", "error": "No GPUs"}, "No GPUs, with CUDA_VISIBLE_DEVICES='7'"),
        ({"visible": "", "error": "No GPUs"}, "No GPUs, with CUDA_VISIBLE_DEVICES=''"),
        ({"smi": False, "files": 0, "driver": "580.65.06"}, "torch counts no GPU"),
        ({"error": "CUDA unknown error\nmore"}, "CUDA unknown error"),
    ],
)
def test_the_error_contains_the_reason_of_torch(
    node: Node, caplog: pytest.LogCaptureFixture, machine_facts: dict, problem: str
) -> None:
    node(**machine_facts)
    unusable = gpus.find_unusable()
    assert unusable.problem.endswith(f": {problem}")
    assert re.match(r"[12] GPUs? \((NVIDIA A100|/.*)\), driver \d+", unusable.found)
    with pytest.raises(UsageError) as error:
        gpus.require_usable_gpus(is_plan=False)
    assert shlex.split(error.value.run)[-2:] == ["--device", "cpu"]
    gpus.require_usable_gpus(is_plan=True)
    assert "training would end here" in caplog.text


def test_nothing_is_reported_without_gpus_or_with_device_cpu(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    node(version="2.13.0+cpu", cuda=None)
    assert gpus.find_unusable()
    gpus.hide_gpus("auto")
    assert gpus.find_unusable()
    gpus.hide_gpus("cpu")
    assert gpus.find_unusable() is None and os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(nvidia, "DEV", Path("/nowhere"))
    monkeypatch.setattr(nvidia, "PROC", Path("/nowhere"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.find_unusable() is None


def test_errors_of_nvidia_smi_are_not_taken_for_gpus(node: Node, tmp_path: Path) -> None:
    node(driver="580.65.06")
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '[N/A]'\n")
    assert nvidia.find_driver() == "580.65.06"
    smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert nvidia.find_driver() == "580.65.06" and nvidia.list_names() == []


def test_the_checks_of_a_machine_and_a_setup_report_unusable_gpus(
    node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    node(version="2.13.0+cu130", cuda="13.0")
    monkeypatch.setattr(
        machine, "measure_disk", lambda directory: {"directory": "/", "free": 10**12}
    )
    facts = machine.collect_facts(tmp_path, tmp_path, [], tmp_path)
    findings = [
        finding
        for finding in node_findings._check_node(
            {**facts, "clock": {"offset_s": 0, "uncertainty_s": 0}}, "node 0", False
        )
        if finding.check == "torch"
    ]
    assert [finding.severity for finding in findings] == ["error"]
    [finding] = setup._check_gpus()
    assert (finding.severity, finding.check) == ("error", "torch")
    stamp = tmp_path / ".bundle.json"
    stamp.write_text('{"summary": {"torch": {"version": "2.13.0+cu130", "cuda": "13.0"}}}')
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    [finding] = setup._check_gpus()
    assert finding.severity == "error" and "--driver-version 535.104.05" in finding.remedy
    stamp.write_text('{"summary": {"torch": {"version": "2.13.0+cu126", "cuda": "12.6"}}}')
    bundle, installed = setup._check_gpus()
    assert "535.104.05 is new enough" in bundle.text
    assert installed.severity == "error"


def hide_two_gpus(rank: int) -> None:
    """Let a process that was just forked find two GPUs that it may not use."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    put_smi(Path("bin"))


def test_stage_04_does_not_train_on_the_cpu_by_mistake(project: Path) -> None:
    """All ranks fail with the same error before the model is read; it mentions --device cpu."""
    train = (
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        SEQ_LENGTH,
        "--max-steps",
        1,
    )
    fake = {"cwd": project, "before": "tests.parallel.test_gpus:hide_two_gpus"}
    failed = run_stage(*train, ranks=2, expect=1, **fake)
    assert failed.stderr.count("error: torch cannot use") >= 1
    assert "2 GPUs (NVIDIA A100), driver 535.104.05" in failed.stderr
    assert "--device cpu" in failed.stderr and not (project / "outputs").exists()
    planned = run_stage(*train, "--dry-run", **fake)
    assert "training would end here" in planned.stdout + planned.stderr
    done = run_stage(*train, "--device", "cpu", **fake)
    assert "on 1 CPU rank" in done.stdout and "no GPU" not in done.stdout
