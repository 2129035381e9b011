"""Declare the options of a new model and of LoRA, without importing torch or transformers."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from lib.core.declared import Role, option
from lib.core.options import count, non_negative, on_off, positive, positive_int
from lib.models import scratch_sizes

# The values of --precision that compute in 8-bit floats, with torchao's name of their scales.
FLOAT8_RECIPES = {"fp8": "tensorwise", "fp8-rowwise": "rowwise"}
_SCALING = re.compile(r"(linear|llama3|yarn):(\d+(?:\.\d+)?)(?::(\d+))?", re.ASCII)


def parse_scaling(text: str) -> str:
    """Return a value of --rope-scaling, with its numbers in their shortest form; "" stays."""
    match = _SCALING.fullmatch(text)
    if not text:
        return ""
    if match is None or float(match[2]) <= 1 or match[3] == "0":
        raise argparse.ArgumentTypeError(
            "expected linear, llama3 or yarn with a factor above 1, and perhaps the length that "
            f"the model was trained on: yarn:4 or yarn:4:32768, got {text!r}"
        )
    kind, factor, original = match.groups()
    return f"{kind}:{float(factor):g}{f':{original}' if original else ''}"


@dataclass(frozen=True)
class ModelOptions:
    """The options of the model to train, if it is new or brings its own code."""

    from_scratch: bool = option(
        False,
        group="the run",
        role=Role.RESULT,
        help="initialise the weights from --seed, even if the model directory contains weights",
    )
    model_size: str | None = option(
        None,
        role=Role.RESULT,
        quiet=True,
        choices=tuple(scratch_sizes.SIZES),
        help="create a model of this size from scratch, without stage 03 (default: use -m)",
    )
    vocab_size: int | None = option(
        None,
        role=Role.RESULT,
        quiet=True,
        parse=positive_int,
        help="with --model-size: tokens in the vocabulary, padded to a multiple of "
        f"{scratch_sizes.VOCABULARY_MULTIPLE} (default: as in --tokenizer; otherwise 1,024 for 1M, "
        "4,096 for tiny, 32,000 for the other sizes)",
    )
    tokenizer: Path | None = option(
        None,
        role=Role.LOCAL,
        parse=Path,
        help="with --model-size: directory of the tokenizer (default: a tokenizer trained on -d; "
        "with --streaming, one token per byte; none with -d synthetic)",
    )
    rope_theta: float | None = option(
        None,
        role=Role.RESULT,
        quiet=True,
        parse=positive,
        help="base of the rotary position embeddings (RoPE); without --rope-scaling, the context "
        "becomes --seq-length if that is longer (default: the model's)",
    )
    rope_scaling: str = option(
        "",
        role=Role.RESULT,
        quiet=True,
        parse=parse_scaling,
        metavar="TYPE:FACTOR[:ORIGINAL]",
        help="scale RoPE, such as yarn:4; TYPE is linear, llama3 or yarn. The context becomes "
        "FACTOR × ORIGINAL tokens. ORIGINAL is the length that the model was trained on, unless "
        "given that of its config (default: the model's scaling)",
    )
    trust_remote_code: bool = option(
        False,
        role=Role.LOCAL,
        help="run the Python code that stage 03 fetched with a model whose type transformers does "
        "not know; only the command line can set this, not --config",
    )


@dataclass(frozen=True)
class LoraOptions:
    """The options of a LoRA adapter."""

    lora_rank: int = option(
        0,
        aliases=("lora_r",),
        group="LoRA",
        role=Role.RESULT,
        quiet=True,
        parse=count,
        help="train a LoRA adapter of rank N and freeze the base model; 0: train the model itself",
    )
    lora_alpha: float = option(
        None,
        role=Role.RESULT,
        quiet=True,
        parse=positive,
        help="scale of the adapter: its output is multiplied by alpha ÷ rank (default: "
        "2 × --lora-rank)",
    )
    lora_dropout: float = option(
        0.0,
        role=Role.RESULT,
        quiet=True,
        parse=non_negative,
        help="dropout probability of the adapter's inputs, from 0 to below 1",
    )
    lora_targets: str = option(
        "all-linear",
        role=Role.RESULT,
        quiet=True,
        metavar="all-linear|attention|mlp|REGEX",
        help="linear layers of the blocks that get an adapter (routers only by REGEX); REGEX "
        "matches the full name of a layer or its last part: 'q_proj|v_proj'",
    )
    lora_rslora: bool = option(
        False,
        aliases=("use_rslora", "peft_use_rslora"),
        role=Role.RESULT,
        quiet=True,
        parse=on_off,
        help="rsLoRA: scale by alpha ÷ √rank instead of alpha ÷ rank, for large ranks",
    )
    lora_from: Path | None = option(
        None,
        aliases=("lora_model_dir",),
        role=Role.LOCAL,
        parse=Path,
        help="adapter directory of PEFT or stage 05 to start from; it defines rank, alpha and "
        "targets (default: A is initialised from --seed, B is zero)",
    )
