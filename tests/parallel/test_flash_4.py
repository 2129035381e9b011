# covers: lib/parallel/flash_4.py, lib/parallel/attention_kernel.py
"""FlashAttention 4 is used where it is installed and works. GPU and package are stand-ins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, MistralConfig

from lib.core import commands
from lib.parallel import attention, attention_kernel, flash_4, varlen
from tests.conftest import ROOT
from tests.parallel.flash_4 import VERSION, write_package
from tests.parallel.test_attention_kernel import LLAMA, hopper, pick_kernel  # noqa: F401

BOTH = attention_kernel.PACKED_KERNELS
DOCUMENTS = torch.tensor([0, 7, 7, 20], dtype=torch.int32)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs the package; see `write_package` for its argument."""

    def install_package(*change: str) -> None:
        write_package(tmp_path, *([change] if change else []))
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
            monkeypatch.delitem(sys.modules, name, raising=False)

    yield install_package
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]


@pytest.fixture
def gpu(hopper: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:  # noqa: F811
    """Return a function that sets the compute capability; packed documents use the GPU's kernel."""

    def set_capability(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    by_document = varlen.attend_by_document
    monkeypatch.setattr(varlen, "attend_by_document", varlen.attend_by_kernel)
    monkeypatch.setattr(varlen, "call_torch", by_document)
    monkeypatch.setattr(varlen, "_packed_kernel", by_document)
    monkeypatch.setattr(attention_kernel, "find_spec", lambda _: None)  # no version 3
    monkeypatch.setattr(attention_kernel, "PACKED_KERNELS", BOTH)
    return set_capability


@pytest.mark.parametrize("capability", [(9, 0), (10, 3)], ids=["Hopper", "Blackwell"])
def test_packed_documents_use_it_if_it_is_installed(gpu, install, capability: tuple) -> None:
    install()
    gpu(*capability)
    kernel = pick_kernel("varlen", "documents")
    assert kernel == f"varlen, by FlashAttention 4 of flash-attn-4 {VERSION}"
    assert varlen._packed_kernel is flash_4.attend
    assert pick_kernel().startswith("sdpa, by cuDNN")  # whole rows are faster there


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)])
def test_it_is_not_used_on_a_gpu_for_which_it_has_no_kernels(
    gpu, install, capability: tuple
) -> None:
    install()
    gpu(*capability)
    kernel = pick_kernel("varlen", "documents")
    assert kernel.startswith("varlen, by FlashAttention 2") and "compute capability" in kernel
    assert varlen._packed_kernel is varlen.call_torch


def test_the_command_that_installs_it_is_logged(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    command = commands.pip_install_optional(*flash_4.PACKAGES)
    page = (ROOT / "docs/how-to/gpu.md").read_text(encoding="utf-8")
    assert command[command.index("flash-attn-4") :] in page
    assert f"flash-attn-4=={VERSION}" in command and "'nvidia-cutlass-dsl[cu13]==" in command
    kernel = pick_kernel("varlen", "documents")
    assert kernel.startswith("varlen, by FlashAttention 2") and command in kernel
    monkeypatch.setattr(attention_kernel, "find_spec", lambda _: True)  # version 3
    kernel = pick_kernel("varlen", "documents")
    assert kernel.startswith("varlen, by FlashAttention 3")
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    kernel = pick_kernel("varlen", "documents")
    assert "--deterministic" in kernel


FAULTS = {
    "lacks a module": ("import torch", "import torch, missing_module"),
    "is another version": ("def _flash_attn_bwd", "def another_name"),
    "does not compile": ("calls.append", "raise RuntimeError('no compiler')\n    calls.append"),
    "fails in backward": ("of_weights =", "raise ValueError('no kernel') #"),
    "is wrong": ("* scale", "* scale * 1.5"),
    "returns NaN": ("scores.softmax(-1)", "scores.softmax(-1) * torch.nan"),
    "leaks": ("(of[:, None] == of) &", ""),
    "is wrong in windows": ("at <= window", "at < window"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_package_that_fails_is_not_used(gpu, install, fault: str) -> None:
    """The run goes on with torch's kernel, and one line names the reason."""
    install(*FAULTS[fault])
    config = MistralConfig(**LLAMA, sliding_window=64)
    kernel = pick_kernel("varlen", "documents", config=config)
    assert kernel.startswith("varlen, by FlashAttention 2")
    assert "\n" not in kernel and varlen._packed_kernel is varlen.call_torch
    reason = {"lacks a module": "missing_module", "returns NaN": "differ by nan"}
    assert reason.get(fault, "") in kernel


def test_the_trial_uses_windows_only_if_the_model_does(gpu, install) -> None:
    install()
    pick_kernel("varlen", "documents", config=MistralConfig(**LLAMA, sliding_window=64))
    interface = sys.modules["flash_attn.cute.interface"]
    assert interface.calls == [None, 39]
    pick_kernel("varlen", "documents", config=LlamaConfig(**LLAMA))
    assert interface.calls == [None, 39, None]


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("query_size, value_size", [(16, 16), (12, 12), (24, 16)])
def test_the_operator_computes_attention_within_documents(
    install, query_size: int, value_size: int, window: int
) -> None:
    install()
    compare(flash_4.attend, query_size, value_size, window)


@pytest.mark.slow
def test_the_operator_compiles_as_one_graph(install) -> None:
    install()
    compare(torch.compile(flash_4.attend, backend="aot_eager", fullgraph=True), 24, 16, 4)


def compare(attend: varlen.PackedKernel, query_size: int, value_size: int, window: int) -> None:
    """Compare output and gradients with those of one document after another."""
    torch.manual_seed(0)
    parts = [
        torch.randn(20, heads, size, requires_grad=True)
        for heads, size in ((4, query_size), (2, query_size), (2, value_size))
    ]
    results = []
    for function in (attend, varlen.attend_by_document):
        out = function(*parts, DOCUMENTS, DOCUMENTS, 20, 0.3, window)
        # The gradient of a sum is expanded, without memory of its own.
        results.append([out, *torch.autograd.grad(out.sum() + out[:, :1].square().sum(), parts)])
    torch.testing.assert_close(*results)


def test_the_operator_has_the_shapes_and_strides_that_it_promises(install) -> None:
    install()
    parts = [torch.randn(20, heads, 16, requires_grad=True) for heads in (4, 2, 2)]
    torch.library.opcheck(flash_4._attend, (*parts, DOCUMENTS, DOCUMENTS, 20, 0.3, 0))


def test_version_4_alone_is_not_taken_for_version_2(
    install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both packages contain a directory `flash_attn`."""
    install()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    problem = attention.flash_problem("bf16", LlamaConfig(**LLAMA))
    assert problem == "the package flash_attn is not installed"
