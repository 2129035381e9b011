"""Attention over packed documents: which implementation, for which hardware and torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from lib.core.errors import UsageError
from lib.parallel import attention


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Return a function that stands in for a GPU of some compute capability."""
    def set_up(*capability: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")

    return set_up


def test_packed_documents_fall_back_to_a_mask_in_words(gpu, monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(attention.log, "info", said.append)
    gpu(9, 0)
    assert attention.choose("auto", "documents", "bf16") == "varlen"
    assert attention.choose("auto", "concat", "fp32") == "sdpa" and not said
    assert attention.choose("auto", "documents", "fp32") == "sdpa"
    assert "takes no fp32" in said.pop()
    gpu(7, 5)
    assert attention.choose("auto", "documents", "fp16") == "sdpa"
    assert "a GPU is older" in said.pop()
    with pytest.raises(UsageError, match="varlen cannot train here"):
        attention.choose("varlen", "documents", "fp16")


@pytest.mark.parametrize("window", [0, 4])
@pytest.mark.parametrize("knows_groups", [True, False], ids=["torch 2.13", "torch 2.11"])
def test_the_kernel_is_asked_in_the_words_of_its_version(monkeypatch: pytest.MonkeyPatch,
                                                         knows_groups: bool, window: int) -> None:
    """The kernel itself needs a GPU; what takes its place knows as many heads as it is given."""
    def attend(query: Tensor, key: Tensor, value: Tensor, boundaries: Tensor, window: tuple,
               ) -> Tensor:
        return attention._by_document(query, key, value, boundaries, None, window[0] + 1)

    def new(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
            window_size=(-1, -1), enable_gqa=False):
        assert enable_gqa and key.shape[1] == 2
        return attend(query, key, value, cu_seq_q, window_size)

    def old(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None,
            window_size=(-1, -1)):
        assert key.shape[1] == 2
        return attend(query, key, value, cu_seq_q, window_size)

    monkeypatch.setattr(varlen, "varlen_attn", new if knows_groups else old)
    torch.manual_seed(0)
    query, key, value = torch.randn(20, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    found = attention._by_kernel(query, key, value, torch.tensor([0, 7, 20]), 20, None, window)
    expected = attention._by_document(query, key, value, torch.tensor([0, 7, 20]), None, window)
    torch.testing.assert_close(found, expected)
