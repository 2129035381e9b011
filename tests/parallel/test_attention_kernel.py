# covers: lib/parallel/attention_kernel.py
"""The fastest attention kernel that gives the right results is chosen. The GPU is a fake."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    _registry,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from transformers import GPT2Config, LlamaConfig, Mamba2Config, MistralConfig, PretrainedConfig

from lib.parallel import attention_kernel

GPU = torch.device("cuda")
CPU = torch.device("cpu")
LLAMA = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
NOT_INSTALLED = "(flash_attn_3 is not installed)"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch):
    """Fake a GPU of compute capability 9.0 with flash_attn_3; the heads are on the CPU.

    FlashAttention 4 has no kernels for it.
    """
    make_heads = attention_kernel._make_heads
    order = torch._C._get_sdp_priority_order()
    monkeypatch.setattr(
        attention_kernel, "_make_heads", lambda config, *_: make_heads(config, torch.float32, CPU)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    monkeypatch.setattr(attention_kernel, "find_spec", lambda _: True)
    monkeypatch.setattr(attention_kernel, "PACKED_KERNELS", (attention_kernel.FLASH_3,))
    let_torch_choose(monkeypatch, SDPBackend.CUDNN_ATTENTION)
    register_flash_3(monkeypatch, lambda: SimpleNamespace(remove=lambda: None))
    yield
    torch._C._set_sdp_priority_order(order)
    if current_flash_attention_impl():
        restore_flash_attention_impl()


def let_torch_choose(monkeypatch: pytest.MonkeyPatch, kernel: SDPBackend) -> None:
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *_, **__: int(kernel))


def register_flash_3(monkeypatch: pytest.MonkeyPatch, register: object) -> None:
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)


def pick_kernel(
    name: str = "sdpa",
    packing: str = "concat",
    precision: str = "bf16",
    device: torch.device = GPU,
    config: PretrainedConfig | None = None,
) -> str:
    config = config or LlamaConfig(**LLAMA)
    config._attn_implementation = name
    return attention_kernel.pick_attention_kernel(
        SimpleNamespace(config=config), packing, precision, device, seq_length=4096
    )


def test_flash_attention_3_is_used_if_its_results_agree(hopper) -> None:
    assert pick_kernel() == "sdpa, by FlashAttention 3 of flash_attn_3"
    assert current_flash_attention_impl() == "FA3"
    assert torch._C._get_sdp_priority_order()[0] == int(SDPBackend.FLASH_ATTENTION)
    assert pick_kernel("varlen", "documents") == "varlen, by FlashAttention 3 of flash_attn_3"


@pytest.mark.parametrize("fault", ["raises", "is missing", "is wrong"])
def test_a_kernel_that_fails_its_trial_is_not_used(
    hopper, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The reason is logged, and torch's own kernel is restored."""
    compute = attention_kernel._compute_attention

    def compute_wrongly(name: str, heads: list[Tensor], window: int) -> list[Tensor]:
        if not current_flash_attention_impl():
            return compute(name, heads, window)
        if fault == "raises":
            raise RuntimeError("no kernel image is available\nmore")
        return [part * 1.1 for part in compute(name, heads, window)]

    def raise_import_error() -> None:
        raise ModuleNotFoundError("No module named 'flash_attn_3._C'")

    monkeypatch.setattr(attention_kernel, "_compute_attention", compute_wrongly)
    if fault == "is missing":
        register_flash_3(monkeypatch, raise_import_error)
    before = torch._C._get_sdp_priority_order()
    reason = {
        "raises": "RuntimeError: no kernel image",
        "is missing": "ModuleNotFoundError: No module named 'flash_attn_3._C'",
        "is wrong": "differ by 0.1 ",
    }[fault]
    kernel = pick_kernel("varlen", "documents")
    assert kernel.startswith("varlen, by FlashAttention 2") and reason in kernel
    assert current_flash_attention_impl() is None
    assert torch._C._get_sdp_priority_order() == before


def test_the_reason_for_not_trying_flash_attention_3_is_logged(
    hopper, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dropout" in pick_kernel(config=GPT2Config(n_embd=64, n_head=4))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    let_torch_choose(monkeypatch, SDPBackend.FLASH_ATTENTION)  # as torch does in this mode
    kernel = pick_kernel()
    assert kernel.startswith("sdpa, by FlashAttention 2") and "--deterministic" in kernel
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    monkeypatch.setattr(attention_kernel, "find_spec", lambda _: None)
    assert (
        pick_kernel("varlen", "documents")
        == f"varlen, by FlashAttention 2 of torch {NOT_INSTALLED}"
    )
    let_torch_choose(monkeypatch, SDPBackend.FLASH_ATTENTION)
    assert pick_kernel() == f"sdpa, by FlashAttention 2 of torch {NOT_INSTALLED}"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "compute capability 9.x" in pick_kernel()
    assert current_flash_attention_impl() is None


@pytest.mark.parametrize("window", [4096, 4097])
def test_the_kernel_of_layers_with_windows_is_named(
    hopper, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    """transformers makes a mask for a window that is not longer than the row."""
    monkeypatch.setattr(
        torch,
        "_fused_sdp_choice",
        lambda *_, attn_mask, **__: int(
            SDPBackend.CUDNN_ATTENTION if attn_mask is None else SDPBackend.EFFICIENT_ATTENTION
        ),
    )
    kernel = pick_kernel(config=MistralConfig(**LLAMA, sliding_window=window))
    masked = f"; layers with a window of {window:,} tokens use a mask, by torch's memory-efficient"
    assert (masked in kernel) == (window == 4096)


def test_other_kernels_are_named(hopper, monkeypatch: pytest.MonkeyPatch) -> None:
    let_torch_choose(monkeypatch, SDPBackend.EFFICIENT_ATTENTION)
    kernel = "torch's memory-efficient kernel"
    assert pick_kernel(precision="fp32") == f"sdpa, by {kernel}"
    assert pick_kernel("sdpa", "documents") == f"sdpa with a mask, by {kernel}"
    in_fp32 = pick_kernel("sdpa", "documents", "fp32")
    assert in_fp32.startswith(f"sdpa with a mask, by {kernel}") and "fp32" in in_fp32
    assert pick_kernel("eager", config=Mamba2Config()) == "none in this family"
    assert pick_kernel("eager").startswith("eager, by matrix products")
    assert pick_kernel(device=CPU).endswith("kernel for CPUs")


@pytest.mark.parametrize("by_mask", [False, True])
def test_the_trial_calls_torch_as_transformers_does(by_mask: bool) -> None:
    heads = attention_kernel._make_heads(LlamaConfig(**LLAMA), torch.float32, CPU)
    assert [tuple(part.shape) for part in heads] == [(1, n, 256, 16) for n in (4, 2, 2)]
    assert attention_kernel._find_torch_backend(heads, by_mask) in SDPBackend.__members__.values()
    assert (
        attention_kernel._make_heads(
            LlamaConfig(**LLAMA | {"num_key_value_heads": 3}), torch.float32, CPU
        )
        == []
    )
