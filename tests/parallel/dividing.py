"""Train tiny models with divided rows; each rank runs this.

argv: a file for the results of rank 0, the ranks per replica, those that share a row, the method,
and names of CASES, REFUSED or BROKEN. Each rank also trains the same model alone, on whole rows.
The results are, for each case, the largest differences of losses, of norms, and of gradients
relative to the norm of all gradients, and the bytes that a rank sends in a step.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    Mamba2Config,
    PretrainedConfig,
    PreTrainedModel,
    StableLmConfig,
    masking_utils,
)
from transformers.masking_utils import find_packed_sequence_indices

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.core.errors import UsageError
from lib.models.weights import initialise_model
from lib.parallel import attention, context, context_trial, parallelize, varlen
from lib.parallel.context import Context
from lib.parallel.degrees import ULYSSES, Degrees
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import token_loss_sum
from lib.parallel.trial import require_isolation
from lib.tokens.batches import MicroBatch, make_micro_batch
from lib.tokens.samples import IGNORED, SampleArrays
from tests.models.families import FAMILIES, SIZES

STEPS = 8
ROWS = 2  # in a micro-batch
LENGTH = 30  # tokens of a row, which 4 ranks cannot share evenly
VOCABULARY = 97


def make_gpt_oss(**changes: Any) -> PretrainedConfig:
    """Return a config with sinks, windows in every second layer, and experts."""
    fields = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "pad_token_id": 0,
    }
    return GptOssConfig(**{**fields, **changes})


class Case(NamedTuple):
    """A model, and how its rows are made.

    documents: lengths of the packed documents in each row; empty for rows without. labels: the
    columns that have labels.
    """

    config: PretrainedConfig
    attention: str = "sdpa"
    documents: tuple[int, ...] = ()
    labels: slice = slice(None)
    recompute: str = "none"


def _make_cases() -> dict[str, Case]:
    packed = (5, 12, 13)  # a document goes over each cut
    families = {
        "llama": FAMILIES["llama3"](),
        "one key head": FAMILIES["llama"](num_key_value_heads=1),
        "mistral": FAMILIES["mistral"](sliding_window=7),
        "gemma": FAMILIES["gemma"](),
        "qwen3": FAMILIES["qwen3"](),
        "phi3": FAMILIES["phi3"](),
        "gpt-oss": make_gpt_oss(),
        "gpt2": FAMILIES["gpt2"](attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
    }
    cases: dict[str, Case] = {}
    for name, config in families.items():
        kernel = "eager" if name == "gpt-oss" else "sdpa"
        cases[name] = Case(config, kernel)
        cases[f"{name}, packed"] = Case(config, kernel, packed)
    for name in ("llama", "mistral"):
        cases[f"{name}, varlen"] = Case(families[name], "varlen")
        cases[f"{name}, packed, varlen"] = Case(families[name], "varlen", packed)
    cases["labels of one rank"] = Case(families["llama"], "sdpa", (), slice(0, 6))
    # Stands for the package flash_attn, and gets the same arguments.
    cases["flash"] = Case(families["mistral"], "flash_attention_2")
    cases["flash, packed"] = Case(families["mistral"], "flash_attention_2", packed)
    for kind in ("selective", "full"):
        cases[kind] = Case(families["llama"], "varlen", packed, recompute=kind)
    return cases


CASES = _make_cases()
# Models that cannot be divided; the result is the error.
REFUSED = {
    "short convolutions": Case(
        Lfm2Config(
            **SIZES,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention"],
        )
    ),
    "state space": Case(
        Mamba2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            head_dim=16,
            num_heads=4,
            n_groups=1,
            expand=2,
            chunk_size=8,
        )
    ),
    "own attention": Case(FAMILIES["falcon_7b"]()),
    "own bias of positions": Case(
        BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
    ),
    "arguments dropped": Case(
        StableLmConfig(**SIZES, vocab_size=VOCABULARY, num_key_value_heads=4)
    ),
    "positions counted": Case(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=32,
            decoder_layers=2,
            decoder_attention_heads=4,
            decoder_ffn_dim=64,
            max_position_embeddings=128,
            is_decoder=True,
            is_encoder_decoder=False,
        )
    ),
    "places of queries": Case(
        Llama4TextConfig(
            **SIZES,
            vocab_size=VOCABULARY,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size_mlp=64,
            num_local_experts=3,
            floor_scale=LENGTH,
        )
    ),
    "frequencies by length": Case(FAMILIES["phi3"](), documents=(5, 25)),
}


# The same for a model whose ranks exchange nothing, which each of two trials has to notice.
BROKEN = ("nothing exchanged", "documents mixed")


def make_batches(case: Case) -> list[MicroBatch]:
    """Return a micro-batch of whole rows for each step, in host memory."""
    draw = np.random.default_rng(0)
    batches = []
    for _ in range(STEPS):
        tokens = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
        labels = np.full((ROWS, LENGTH), IGNORED)
        labels[:, case.labels] = tokens[:, 1:][:, case.labels]
        positions = None
        if case.documents:
            row = np.concatenate([np.arange(length) for length in case.documents])
            positions = np.tile(row, (ROWS, 1))
            labels[:, np.flatnonzero(row == 0)[1:] - 1] = IGNORED
        batches.append(make_micro_batch(SampleArrays(tokens[:, :-1], labels, positions), False))
    return batches


def find_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole gradients of a model by the names of its parameters."""
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }


def train(model: nn.Module, case: Case, layout: ParallelLayout) -> list[tuple[Any, ...]]:
    """Return loss, norm and gradients of each step. All groups of ranks read the same rows."""
    # Not AdamW, which moves a weight of tiny gradients as far as any other, by their rounding.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = []
    for batch in make_batches(case):
        labels = int((batch.labels != IGNORED).sum()) * layout.dp_size
        loss = token_loss_sum(model, batch.to(layout))
        loss.backward()
        for p in model.parameters():
            p.grad /= labels
        gradients = find_gradients(model)
        norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        total = layout.sum_over_ranks([loss.item()])[0] if layout.ranks > 1 else loss.item()
        steps.append((total / labels, norm, gradients))
    return steps


def make_model(case: Case, packing: str, mesh: DeviceMesh | None) -> PreTrainedModel:
    """Return a model with the weights of seed 0, sharded over a mesh or whole."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(case.config, attn_implementation="eager")
    if mesh is not None:
        parallelize.parallelize(model, mesh, "fp32", case.recompute)
    parallelize.materialise_model(model, torch.device("cpu"), offload=False)
    initialise_model(model, seed=0)
    model.config._attn_implementation = case.attention
    attention.avoid_device_reads(model, packing, LENGTH)
    return model


def cut_padding(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return a gradient without the rows that let ranks share it evenly."""
    return gradient[tuple(slice(size) for size in shape)]


def compare(case: Case, layout: ParallelLayout) -> dict[str, float]:
    """Return the largest differences between divided and whole rows, and the bytes of a step.

    sent: the bytes that a rank sends to others by all-to-all.
    """
    packing = "documents" if case.documents else "none"
    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices  # for another case
    whole, divided = (make_model(case, packing, mesh) for mesh in (None, layout.fsdp))
    context_trial.require_divisible(divided, layout, packing)
    if case.documents:
        require_isolation(divided, layout)
    # A context of one rank, since the mask of gpt-oss in transformers ignores documents otherwise.
    own = dist.new_group([layout.rank], use_local_synchronization=True)
    alone = replace(layout, ranks=1, dp_size=1, context=Context(0, 1, ULYSSES, own))
    differences = {"loss": 0.0, "norm": 0.0, "gradient": 0.0, "sent": 0.0}
    with mock.patch.object(context, "_exchange", wraps=context._exchange) as exchange:
        steps = train(divided, case, layout)
    for call in exchange.call_args_list:  # each rank keeps its own part
        size = call.args[0].nbytes * (layout.context.size - 1) / layout.context.size
        differences["sent"] += size / STEPS
    pairs = zip(steps, train(whole, case, alone), strict=True)
    for (loss, norm, gradients), (other_loss, other_norm, others) in pairs:
        largest = max(
            (cut_padding(gradients[name], other.shape) - other).abs().max().item()
            for name, other in others.items()
        )
        for key, value in (
            ("loss", abs(loss - other_loss)),
            ("norm", abs(norm - other_norm) / other_norm),
            ("gradient", largest / other_norm),
        ):
            differences[key] = max(differences[key], value)
    return differences


def find_error(name: str, layout: ParallelLayout) -> str:
    """Return the error for a model that cannot be divided; the same on all ranks."""
    case = REFUSED.get(name, CASES["llama, packed"])
    packing = "documents" if case.documents else "none"
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(case.config)
    parallelize.parallelize(model, layout.fsdp, "fp32")
    with context.rehearsal() if name in BROKEN else nullcontext():
        try:
            if name != "documents mixed":
                context_trial.require_divisible(model, layout, packing, "fp32", LENGTH)
            require_isolation(model, layout)
        except UsageError as error:
            return error.render()
    return ""


def attend_flash(module: nn.Module, *heads: Tensor, **options: Any) -> tuple[Tensor, None]:
    """Compute attention as transformers' function for flash_attn, by documents."""
    assert options["cu_seq_lens_q"] is not None and options["cu_seq_lens_k"] is not None
    out, _ = varlen.attend_varlen(module, *heads, **options)
    return out, None


def main() -> None:
    path, shard, size, method, *names = sys.argv[1:]
    AttentionInterface.register("flash_attention_2", attend_flash)
    layout = ParallelLayout.start(Degrees(int(shard), int(size), method))
    results = {
        name: compare(CASES[name], layout) if name in CASES else find_error(name, layout)
        for name in names or CASES
    }
    if layout.rank == 0:
        Path(path).write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
