# covers: lib/parallel/attention.py, lib/parallel/varlen.py
"""The right implementation of attention is picked and gets the right inputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    FalconConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
)

from lib.core import log
from lib.core.errors import UsageError
from lib.parallel import attention, varlen
from lib.parallel.trial import SingleDevice
from lib.tokens.batches import make_micro_batch
from lib.tokens.samples import SampleArrays

LLAMA = LlamaConfig(hidden_size=32, num_attention_heads=4)


class FakeModel:
    """A model with an implementation of attention and nothing else."""

    def __init__(self, implementation: str) -> None:
        self.config = SimpleNamespace(_attn_implementation=implementation)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that fakes a GPU of some compute capability."""

    def fake_gpu(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    return fake_gpu


def test_packed_documents_use_the_varlen_kernel_if_it_can_train(gpu) -> None:
    gpu(9, 0)
    assert attention.choose_attention("auto", True, "bf16", LLAMA) == "varlen"
    assert attention.choose_attention("auto", False, "fp32", LLAMA) == "sdpa"
    wide = LlamaConfig(hidden_size=1040, num_attention_heads=4)  # 260 numbers per head
    cases = [
        ((9, 0), "fp32", LLAMA, "does not support fp32"),
        ((7, 5), "fp16", LLAMA, "a GPU is older"),
        ((9, 0), "bf16", wide, "heads of at most 256 numbers; this model has 260"),
        ((9, 0), "bf16", Gemma4TextConfig(), "this model has 512"),
        ((9, 0), "bf16", GPT2Config(), "dropout of this model"),
        ((8, 6), "bf16", LlamaConfig(head_dim=208), "no backward kernel"),
        ((9, 0), "bf16", FalconConfig(), "attention of their own"),
    ]
    for capability, precision, config, reason in cases:
        gpu(*capability)
        assert attention.choose_attention("auto", True, precision, config) == "sdpa"
        with pytest.raises(UsageError, match="varlen cannot train here") as error:
            attention.choose_attention("varlen", True, precision, config)
        assert reason in error.value.render()


def test_flash_attention_is_used_if_its_package_can_train(gpu, monkeypatch, capsys) -> None:
    log.setup()
    assert attention.flash_problem("bf16", LLAMA) == "flash_attn needs a GPU"
    gpu(9, 0)
    assert "not installed" in attention.flash_problem("bf16", LLAMA)
    monkeypatch.setattr(attention, "find_spec", lambda _: SimpleNamespace(origin="__init__.py"))
    assert attention.resolve_flash("bf16", LLAMA) == "flash_attention_2"
    assert (
        attention.choose_attention("flash_attention_2", False, "bf16", LLAMA) == "flash_attention_2"
    )
    wide = LlamaConfig(hidden_size=1040, num_attention_heads=4)
    for capability, precision, config, reason in (
        ((9, 0), "fp32", LLAMA, "flash_attn does not support fp32"),
        ((7, 5), "fp16", LLAMA, "a GPU is older"),
        ((9, 0), "bf16", wide, "this model has 260"),
    ):
        gpu(*capability)
        assert attention.resolve_flash(precision, config) == "auto"
        [line] = capsys.readouterr().out.splitlines()
        assert reason in line and "the fastest kernel available" in line
        with pytest.raises(UsageError, match="flash_attention_2 cannot train here") as error:
            attention.choose_attention("flash_attention_2", False, precision, config)
        assert reason in error.value.render() and "--attention flash" in error.value.run


@pytest.mark.parametrize(
    "config, sizes",
    [
        (LLAMA, (8, 8)),
        (DeepseekV3Config(), (192, 128)),
        (Gemma3TextConfig(head_dim=256), (256, 256)),
        (LlamaConfig(hidden_size=36, num_attention_heads=3), (12, 12)),
        (GPT2Config(), (64, 64)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_head_sizes_are_read_from_the_config(config: PretrainedConfig, sizes: tuple) -> None:
    assert attention.find_head_sizes(config) == sizes


@pytest.mark.parametrize("query_size, value_size", [(12, 12), (24, 16)], ids=["12", "24 and 16"])
def test_heads_are_padded_to_a_size_that_the_kernel_supports(
    monkeypatch: pytest.MonkeyPatch, query_size: int, value_size: int
) -> None:
    """torch's kernel needs heads of one size, a multiple of eight."""

    def kernel(query, key, value, ends, *_, scale, **__):
        assert query.shape[2] == key.shape[2] == value.shape[2] and query.shape[2] % 8 == 0
        return varlen.attend_by_document(query, key, value, ends, ends, 20, scale, 0)

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    torch.manual_seed(0)
    parts = [torch.randn(20, 2, size) for size in (query_size, query_size, value_size)]
    ends = torch.tensor([0, 7, 20])
    actual = varlen.attend_by_kernel(*parts, ends, ends, 20, None, 0)
    torch.testing.assert_close(actual, varlen.attend_by_document(*parts, ends, ends, 20, None, 0))


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("has_gqa", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_the_kernel_is_called_with_the_arguments_of_its_version(
    monkeypatch: pytest.MonkeyPatch, has_gqa: bool, window: int
) -> None:
    """The kernel itself needs a GPU. A fake with the same signature replaces it."""

    def attend(
        query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, window: tuple
    ) -> Tensor:
        return varlen.attend_by_document(
            query, key, value, boundaries, boundaries, 13, None, window[0] + 1
        )

    def varlen_attn_2_13(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        *,
        scale=None,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        assert enable_gqa and key.shape[1] == 2 and max_q == max_k == 13
        return attend(query, key, value, cu_seq_q, window_size)

    def varlen_attn_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
    ):
        assert key.shape[1] == 2
        return attend(query, key, value, cu_seq_q, window_size)

    kernel = varlen_attn_2_13 if has_gqa else varlen_attn_2_11
    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr(varlen, "_GROUPS", varlen.group_arguments(kernel))
    torch.manual_seed(0)
    query = torch.randn(20, 4, 8)
    key = torch.randn(20, 2, 8)
    value = torch.randn(20, 2, 8)
    ends = torch.tensor([0, 7, 20])
    actual = varlen.attend_by_kernel(query, key, value, ends, ends, 13, None, window)
    expected = varlen.attend_by_document(query, key, value, ends, ends, 13, None, window)
    torch.testing.assert_close(actual, expected)


def test_a_document_longer_than_the_longest_is_an_error() -> None:
    """The kernel of a GPU would ignore the end of the document."""
    parts = [torch.randn(20, 2, 8) for _ in range(3)]
    ends = torch.tensor([0, 7, 20])
    with pytest.raises(AssertionError, match="13 tokens, more than 12"):
        varlen.attend_by_document(*parts, ends, ends, 12, None, 0)


@pytest.mark.parametrize("implementation", ["varlen", "flash_attention_2"])
def test_the_model_gets_boundaries_and_the_longest_document(implementation: str) -> None:
    """The tensor that the model gets, a copy on its device, is marked as dynamic."""
    model = FakeModel(implementation)
    positions = np.array([[*range(100), *range(156)]] * 2)
    rows = SampleArrays(np.zeros((2, 256), np.int64), np.zeros((2, 256), np.int64), positions)
    batch = make_micro_batch(rows, pin=False).to(SingleDevice(torch.device("meta")))
    inputs = attention.make_inputs(model, batch)
    assert inputs["max_length_q"] == inputs["max_length_k"] == 256
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] is batch.boundaries
    assert batch.boundaries.is_meta and batch.boundaries._dynamo_weak_dynamic_indices == {0}
    shorter = attention.make_inputs(model, batch._replace(longest=128))
    assert shorter["max_length_q"] == shorter["max_length_k"] == 128


def test_the_longest_document_of_a_batch_reaches_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths: list[int] = []

    def store_length(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, longest: int, *__: Any
    ) -> Tensor:
        lengths.append(longest)
        return query

    monkeypatch.setattr(varlen, "attend_by_document", store_length)
    heads = torch.zeros(2, 4, 256, 8)
    varlen.attend_varlen(None, heads, heads, heads, None, max_length_q=128)
    varlen.attend_varlen(None, heads, heads, heads, None)
    assert lengths == [128, 256]
