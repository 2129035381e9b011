"""GPUs that nothing uses are named once, with the command that uses all of them."""

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
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Return a function that gives the line for a machine with eight GPUs."""
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
def test_the_command_of_torchrun_with_all_gpus_is_named(said, ranks, expected) -> None:
    [line] = said(is_torchrun=True, ranks=ranks).splitlines()
    head, _, command = line.partition("; all of them: ")
    assert head == f"uses {ranks} of the 8 GPUs of this machine"
    assert shlex.split(command) == expected


def test_without_torchrun_and_with_a_launcher(said) -> None:
    words = shlex.split(said().partition("all of them: ")[2])
    at = words.index("--nproc-per-node")
    assert words[at + 1 :] == ["8", STAGE, "-e", "x", "-d", "a b"]
    text = said(launched_as="launch/single_node.sh --nproc-per-node 2 -- -e x", ranks=2)
    assert "uses 2 of the 8 GPUs" in text
    assert "launch/single_node.sh --nproc-per-node=8 -- -e x" in text
    text = said(launched_as="launch/single_node.sh -- -e x")
    assert "launch/single_node.sh --nproc-per-node 8 -- -e x" in text
    assert "--nproc-per-node 8 uses all" in said(launched_as="sbatch launch/slurm.sbatch -e x")


def test_nothing_is_said_where_all_are_used_or_none_is_wanted(said) -> None:
    assert not said(is_torchrun=True, ranks=8)
    assert not said(is_torchrun=True, device="cpu")


def test_an_offload_without_a_gpu_is_warned_about(capsys: pytest.CaptureFixture) -> None:
    log.setup()
    for device in ("cpu", "auto") if not torch.cuda.is_available() else ("cpu",):
        gpus.warn_without_offload(device)
        assert "--cpu-offload changes nothing here" in capsys.readouterr().out
    gpus.report_unused("cpu")
    assert not capsys.readouterr().out
