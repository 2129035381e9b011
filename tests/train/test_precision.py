"""Which dtypes a device computes in, by what torch says of it, and what the others cost."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib import metadata

import pytest
import torch

from lib.core.errors import UsageError
from lib.train import precision
from lib.train.config import Config
from tests.conftest import ROOT

# What the environment lets torch and oneDNN use of a newer processor: the one of most laptops.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the environment is of x86 processors")
def test_a_processor_without_bf16_takes_fp32_and_warns_of_what_is_emulated():
    code = (
        "from lib.core import log; from lib.train import precision\n"
        "log.setup()\n"
        "print('default', precision.default())\n"
        "for name in ('bf16', 'fp16', 'fp32'): precision.warn_if_emulated(name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, **AVX2},
        check=True,
    )
    assert "default fp32" in done.stdout
    factors = re.findall(
        r"^warning: this processor only emulates (\S+): a matrix product takes "
        r"about (\d+) times as long as in fp32; --precision fp32 is the default "
        r"here$",
        done.stdout,
        re.MULTILINE,
    )
    assert [name for name, _ in factors] == ["bf16", "fp16"]
    assert all(int(factor) > 3 for _, factor in factors)


@pytest.mark.parametrize(
    ("avx512", "avx512_bf16", "onednn", "emulated"),
    [
        (True, True, True, False),
        (True, False, True, True),
        (False, False, True, False),
        (False, False, False, True),
    ],
    ids=["Zen 4", "Cascade Lake", "Neoverse or Lunar Lake", "AVX2"],
)
def test_bf16_by_processor(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, avx512_bf16: bool, onednn: bool, emulated: bool
):
    """oneDNN says that it takes bf16 also where it needs several times as long."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert precision.is_emulated("bf16") is emulated
    assert precision.default() == ("fp32" if emulated else "bf16")
    assert not precision.is_emulated("fp32")


def test_what_fp8_lacks_is_told(monkeypatch: pytest.MonkeyPatch):
    def told(seq_length: int = 1024, **changes: object) -> str:
        given = Config(**{"compile": True, "seq_length": seq_length} | changes)
        try:
            precision.require_float8(given)
        except UsageError as error:
            return error.render()
        return ""

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in told() and "needs a GPU" not in told(plan_gpus=[8])
    assert "in a pass" not in told() and not told(1001, plan_gpus=[8])
    assert "1,001 in a pass" in told(1001, plan_gpus=[8], batch_size=1)
    assert not told(1001, plan_gpus=[8], batch_size=16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "A100" in told() and "Hopper" in told()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert not told() and "slower than bf16" in told(compile=False)
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution("absent"))
    assert "torchao, which is not installed" in told()
