# covers: lib/parallel/gpus.py
"""Unused GPUs are reported once, with the command that uses all of them."""

from __future__ import annotations

import shlex
import sys

import pytest
import torch

from lib.core import commands, log
from lib.parallel import gpus
from tests.conftest import ROOT

STAGE = str(ROOT / "04_train_fsdp.py")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that returns the log line for a machine with eight GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable])

    def say(
        is_torchrun: bool = False, ranks: int = 1, launched_as: str = "", device: str = "auto"
    ) -> str:
        monkeypatch.setattr(sys, "argv", [STAGE, "-e", "x", "-d", "a b"])
        monkeypatch.setattr(commands, "_torchrun", lambda: ["torchrun"])
        monkeypatch.setattr(commands, "_launcher", lambda: ["launch/single_node.sh"])
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if is_torchrun:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.delenv(commands.LAUNCHED_AS, raising=False)
        if launched_as:
            monkeypatch.setenv(commands.LAUNCHED_AS, launched_as)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        log.setup()
        gpus.report_unused(device)
        return capsys.readouterr().out

    return say


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, ["torchrun", "--nproc-per-node", "8", STAGE, "-e", "x", "-d", "a b"]),
        (2, ["launch/single_node.sh", "--nproc-per-node=8", "--", "-e", "x", "-d", "a b"]),
    ],
)
def test_the_command_of_torchrun_with_all_gpus_is_named(report, ranks, expected) -> None:
    [line] = report(is_torchrun=True, ranks=ranks).splitlines()
    head, _, command = line.partition("; all of them: ")
    assert head == f"uses {ranks} of the 8 GPUs of this machine"
    assert shlex.split(command) == expected


def test_without_torchrun_the_option_is_named(report) -> None:
    words = shlex.split(report().partition("all of them: ")[2])
    at = words.index("--nproc-per-node")
    assert words[at + 1 :] == ["8", STAGE, "-e", "x", "-d", "a b"]
    text = report(launched_as="launch/single_node.sh --nproc-per-node 2 -- -e x", ranks=2)
    assert "uses 2 of the 8 GPUs" in text
    assert "launch/single_node.sh --nproc-per-node=8 -- -e x" in text
    text = report(launched_as="launch/single_node.sh -- -e x")
    assert "launch/single_node.sh --nproc-per-node 8 -- -e x" in text
    assert "--nproc-per-node 8 uses all" in report(launched_as="sbatch launch/slurm.sbatch -e x")


def test_nothing_is_logged_if_all_gpus_are_used_or_the_cpu_is_asked_for(report) -> None:
    assert not report(is_torchrun=True, ranks=8)
    assert not report(is_torchrun=True, device="cpu")


def test_offload_without_a_gpu_causes_a_warning(capsys: pytest.CaptureFixture) -> None:
    log.setup()
    for device in ("cpu", "auto") if not torch.cuda.is_available() else ("cpu",):
        gpus.warn_without_offload(device)
        assert "--cpu-offload changes nothing here" in capsys.readouterr().out
    gpus.report_unused("cpu")
    assert not capsys.readouterr().out
