# covers: lib/parallel/gpus.py, lib/parallel/nvidia.py
"""The error names the reasons why torch cannot use GPUs. All tools are fakes."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from launch.checks import machine, node_findings, setup
from lib.core.errors import UsageError
from lib.parallel import gpus, nvidia
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
    ("machine_facts", "problem", "hint"),
    [
        (
            {"version": "2.13.0+cu130", "cuda": "13.0"},
            "driver 535.104.05 is too old for torch 2.13.0, whose CUDA 13.0 needs 580 or newer",
            "update the driver or install torch 2.13.0+cu126, which runs with it",
        ),
        (
            {"version": "2.13.0+cpu", "cuda": None},
            "torch 2.13.0+cpu is built without CUDA",
            "install torch 2.13.0+cu126, which runs with it",
        ),
        (
            {"smi": False, "driver": "580.65.06", "version": "2.13.0+cpu", "cuda": None},
            "is built without CUDA",
            "install torch 2.13.0+cu130, which runs with it",
        ),
        ({"visible": ""}, "CUDA_VISIBLE_DEVICES is empty, which hides them", "unset CUDA_VIS"),
        ({"visible": "NoDevFiles"}, "is 'NoDevFiles', which hides them", "--gres=gpu:8"),
        (
            {"visible": "7", "error": "No CUDA GPUs are available"},
            "No CUDA GPUs are available, with CUDA_VISIBLE_DEVICES=7",
            "name GPUs of this machine",
        ),
        ({"smi": False, "files": 0, "driver": "580.65.06"}, "was given none of them", "--gpus all"),
        ({"smi": False, "driver": "470.57"}, "driver 470.57 is too old", "update the driver"),
        (
            {
                "error": "Unexpected error from cudaGetDeviceCount(). "
                "Error 802: system not yet initialized"
            },
            "Error 802",
            "nvidia-fabricmanager",
        ),
        ({"error": "CUDA unknown error\nmore"}, "CUDA unknown error", "dmesg"),
    ],
)
def test_the_cause_is_named(node: Node, machine_facts: dict, problem: str, hint: str) -> None:
    node(**machine_facts)
    unusable = gpus.find_unusable()
    assert len(unusable.reasons) == 1 and problem in unusable.problem and hint in unusable.hint
    assert re.match(r"[12] GPUs? \((NVIDIA A100|/.*)\), driver \d+", unusable.found)
    with pytest.raises(UsageError) as error:
        gpus.require_usable_gpus(is_plan=False)
    assert error.value.hint.endswith("on the CPU instead:")
    assert shlex.split(error.value.run)[-2:] == ["--device", "cpu"]


def test_all_causes_are_reported_at_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    node(version="2.12.1+cu132", cuda="13.2", visible="")
    assert [reason.problem.split()[0] for reason in gpus.find_unusable().reasons] == [
        "driver",
        "CUDA_VISIBLE_DEVICES",
    ]
    gpus.require_usable_gpus(is_plan=True)
    assert "training would end here: torch cannot use the GPUs" in caplog.text


def test_a_device_without_permission_is_reported(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> int:
        raise PermissionError

    node(smi=False, driver="580.65.06")
    monkeypatch.setattr(gpus.os, "open", refuse)
    assert "may not open" in gpus.find_unusable().problem


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


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ((9, 0), ["sm_75", "sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((7, 0), ["sm_75", "sm_80", "sm_90"], False),
        ((12, 0), ["sm_80", "sm_90"], False),
        ((12, 0), ["sm_90", "compute_90"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 3), ["sm_100a"], False),
        ((10, 3), ["sm_100f"], True),
        ((8, 0), ["sm_86"], False),
        ((9, 4), ["gfx90a", "gfx942"], True),
    ],
)
def test_a_build_of_torch_without_code_for_the_gpu_is_reported(
    monkeypatch: pytest.MonkeyPatch, capability: tuple, architectures: list, runs: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in (
        ("is_available", True),
        ("device_count", 2),
        ("get_arch_list", architectures),
        ("get_device_capability", capability),
        ("get_device_name", "a GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    unusable = gpus.find_unusable()
    assert (unusable is None) == runs
    assert (
        runs or f"{capability[0]}.{capability[1]}, only for {architectures[0]}" in unusable.problem
    )
    assert runs or ("+cu128" if capability[0] >= 10 else "+cu126") in unusable.hint


def test_the_checks_of_a_machine_and_a_setup_report_a_driver_that_is_too_old(
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
    assert "too old" in findings[0].text
    assert "+cu126" in findings[0].remedy
    [finding] = setup._check_gpus()
    assert (finding.severity, finding.check) == ("error", "torch")
    assert "too old" in finding.text
    stamp = tmp_path / ".bundle.json"
    stamp.write_text('{"summary": {"torch": {"version": "2.13.0+cu130", "cuda": "13.0"}}}')
    monkeypatch.setattr(setup, "ROOT", tmp_path)
    [finding] = setup._check_gpus()
    assert finding.severity == "error" and "--driver-version 535.104.05" in finding.remedy
    stamp.write_text('{"summary": {"torch": {"version": "2.13.0+cu126", "cuda": "12.6"}}}')
    bundle, installed = setup._check_gpus()
    assert "535.104.05 is new enough for torch 2.13.0+cu126" in bundle.text
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
    assert failed.stderr.count("error: torch cannot use the GPUs of this machine: ") >= 1
    assert "CUDA_VISIBLE_DEVICES is empty, which hides them" in failed.stderr
    assert "2 GPUs (NVIDIA A100), driver 535.104.05" in failed.stderr
    assert "--device cpu" in failed.stderr and not (project / "outputs").exists()
    planned = run_stage(*train, "--dry-run", **fake)
    assert "training would end here: torch cannot use" in planned.stdout + planned.stderr
    done = run_stage(*train, "--device", "cpu", **fake)
    assert "on 1 CPU rank" in done.stdout and "no GPU" not in done.stdout
