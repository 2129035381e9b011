# covers: lib/parallel/precision.py
"""The default precision is one that the device computes in, and emulation causes a warning."""

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
from lib.parallel import precision
from lib.tokens.batches import Pass
from tests.conftest import ROOT

# What the environment lets torch and oneDNN use of a newer processor: the one of most laptops.
AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the environment is of x86 processors")
def test_a_processor_without_bf16_uses_fp32_and_warns_about_emulation():
    code = (
        "from lib.core import log; from lib.parallel import precision\n"
        "log.setup()\n"
        "print('default', precision.default_precision())\n"
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
def test_bf16_is_the_default_only_if_the_processor_computes_in_it(
    monkeypatch: pytest.MonkeyPatch, avx512: bool, avx512_bf16: bool, onednn: bool, emulated: bool
):
    """oneDNN reports support for bf16 even if it takes several times as long as float32."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    known = {"avx512_f": avx512, "avx512_bf16": avx512_bf16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    assert precision.is_emulated("bf16") is emulated
    assert precision.default_precision() == ("fp32" if emulated else "bf16")
    assert not precision.is_emulated("fp32")


def test_errors_list_what_fp8_needs(monkeypatch: pytest.MonkeyPatch):
    def error(
        seq_length: int = 1024,
        is_plan: bool = False,
        compile: bool = True,
        batch: int | None = None,
        context: int = 1,
    ) -> str:
        try:
            size = None if batch is None else Pass(batch, seq_length, context)
            precision.require_float8(is_plan, compile, size)
        except UsageError as raised:
            return raised.render()
        return ""

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in error() and "needs a GPU" not in error(is_plan=True)
    assert "multiple" not in error() and not error(1001, is_plan=True)
    assert "1,001 =" in error(1001, is_plan=True, batch=1)
    assert not error(1001, is_plan=True, batch=16)
    assert not error(1023, is_plan=True, batch=1, context=4)  # 255 tokens, or 256 with padding
    assert "500 = 2 " in error(1000, True, batch=2, context=4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert "A100" in error() and "Hopper" in error()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert not error() and "slower than bf16" in error(compile=False)
    monkeypatch.setattr(metadata, "version", lambda name: metadata.distribution("absent"))
    assert "torchao" in error()
