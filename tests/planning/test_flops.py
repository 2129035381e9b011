# covers: lib/planning/flops.py, lib/planning/peaks.py
"""The operations per token follow the formula, and the peak of a GPU its data sheet."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig

from lib.models.lora import Lora
from lib.models.sharded import Placement
from lib.parallel import loss
from lib.planning import flops, peaks
from lib.tokens.batches import MicroBatch


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA H20-3e", 148e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B300 SXM6 AC", 2250e12),
        ("NVIDIA GB300", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 312e12 * 3 / 7),
        ("NVIDIA H200 MIG 1g.18gb", 989e12 / 7),
        ("NVIDIA A10", 125e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40", 181e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA RTX 6000 Ada Generation", 364e12),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 503.8e12),
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA GeForce RTX 5090", 209.5e12),
        ("NVIDIA GeForce RTX 3060", None),
        ("NVIDIA A1000", None),
        ("Quadro RTX 6000", None),
    ],
)
def test_the_peak_of_a_gpu_is_found_by_its_whole_name(name: str, peak: float | None) -> None:
    assert peaks.find_listed_peak(name) == pytest.approx(peak)


def test_attention_counts_all_pairs_of_tokens_or_the_causal_half() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=100,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    products = sum(p.numel() for p in model.parameters()) - 100 * 64  # an embedding multiplies none
    assert flops.count_per_token(model, 512) == 6 * products + 12 * 3 * 64 * 512
    assert flops.count_causal(model, 512) == 6 * products + 6 * 3 * 64 * 512


def test_frozen_weights_have_no_gradients() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=100,
                hidden_size=64,
                intermediate_size=96,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=2,
            )
        )
    frozen = sum(p.numel() for p in model.parameters()) - 100 * 64
    Lora(4, 8.0).convert(model, Placement())
    trained = model.num_parameters(only_trainable=True)
    assert trained == 3 * 4 * (2 * 64 + 2 * (64 + 32) + 2 * 64 + 3 * (64 + 96))
    assert flops.count_per_token(model, 512) == 4 * frozen + 6 * trained + 12 * 3 * 64 * 512


def test_no_gradient_of_a_frozen_weight_is_computed() -> None:
    """Of the products that count, the first block omits the gradient of its input."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            LlamaConfig(
                vocab_size=512,
                hidden_size=64,
                intermediate_size=160,
                num_hidden_layers=4,
                num_attention_heads=4,
                num_key_value_heads=2,
            ),
            attn_implementation="sdpa",
        )
    Lora(4, 8.0).convert(model, Placement())
    model.to_empty(device="cpu")
    head = model.get_output_embeddings()
    head.forward = loss.LossHead(head, 16 * 512)  # numbers of logits at once: in chunks
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        loss.token_loss_sum(model, MicroBatch(tokens, tokens)).backward()
    products = flops.count_per_token(model, 0) * tokens.numel()
    assert 0.9 * products < counted.get_total_flops() <= products
    assert all(p.requires_grad == (p.grad is not None) for p in model.parameters())
