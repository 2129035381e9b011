"""Train with torchtitan on one GPU, for tests/gpu/peers.py; its log has the speed.

torchtitan 0.2.2 needs no network for this: its table of datasets takes a local one, and its models
get the sizes of a config.json of transformers. Any kind of Llama or Qwen3 can be trained.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

LOG_FREQ = 5  # steps, as stage 04 logs in a measured run
_NAME = "peer"  # of the model's sizes and of the dataset, in torchtitan's tables


def main() -> None:
    """Run torchtitan's own training loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "tokens", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("batch", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--packed", type=int, default=0, help="1: documents do not see each other")
    args = parser.parse_args()
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    for key, value in (one_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}).items():
        os.environ.setdefault(key, value)
    config = json.loads((args.model / "config.json").read_text())
    # torchtitan reads sys.argv as soon as torchtitan.config is imported.
    sys.argv = ["torchtitan", *list_options(args, choose_family(config))]
    from torchtitan import train

    _add_model(config, bool(args.packed))
    _add_dataset(args)
    train.main(train.Trainer)


def list_options(args: argparse.Namespace, family: str) -> list[str]:
    """Return torchtitan's options: compiled blocks, no recomputation, no checkpoints."""
    values = {
        "model.name": family,
        "model.flavor": _NAME,
        "model.hf_assets_path": args.model,
        "training.dataset": _NAME,
        "training.local_batch_size": args.batch,
        "training.seq_len": args.length,
        "training.steps": args.steps,
        "lr_scheduler.warmup_steps": 1,
        "metrics.log_freq": LOG_FREQ,
        "activation_checkpoint.mode": "none",
        "job.dump_folder": args.out.with_suffix(""),
    }
    words = [str(word) for name, value in values.items() for word in (f"--{name}", value)]
    return [*words, "--compile.enable", "--metrics.disable_color_printing"]


def choose_family(config: dict[str, Any]) -> str:
    """Return torchtitan's family for a config.json; its Llama has no tied embeddings."""
    is_llama = config["model_type"] == "llama" and not config["tie_word_embeddings"]
    return "llama3" if is_llama else "qwen3"


def convert_sizes(config: dict[str, Any], packed: bool) -> dict[str, Any]:
    """Return the arguments of torchtitan's model, without its experts."""
    sizes = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "eos_id": config["eos_token_id"],
    }
    if packed:
        sizes |= {"attn_type": "varlen", "attn_mask_type": "block_causal"}
    intermediate = config["intermediate_size"]
    if choose_family(config) == "llama3":  # it computes the size from these two
        ratio = intermediate / (8 * config["hidden_size"] // 3)
        return sizes | {"ffn_dim_multiplier": ratio, "multiple_of": math.gcd(intermediate, 1024)}
    return sizes | {
        "head_dim": config["head_dim"],
        "hidden_dim": intermediate,
        "qk_norm": config["model_type"] != "llama",
        "enable_weight_tying": config["tie_word_embeddings"],
    }


def _add_model(config: dict[str, Any], packed: bool) -> None:
    """Add the model's sizes to the table of its family."""
    from torchtitan.models.llama3 import TransformerModelArgs, llama3_args
    from torchtitan.models.moe import MoEArgs
    from torchtitan.models.qwen3 import Qwen3ModelArgs, qwen3_args

    sizes = convert_sizes(config, packed)
    if choose_family(config) == "llama3":
        llama3_args[_NAME] = TransformerModelArgs(**sizes)
        return
    if experts := config.get("num_experts"):
        sizes |= {
            "moe_enabled": True,
            "moe_inter_dim": config["moe_intermediate_size"],
            "moe_args": MoEArgs(
                num_experts=experts,
                num_shared_experts=0,
                top_k=config["num_experts_per_tok"],
                score_func="softmax",
                route_norm=config["norm_topk_prob"],
                score_before_experts=False,
            ),
        }
    qwen3_args[_NAME] = Qwen3ModelArgs(**sizes)


def _add_dataset(args: argparse.Namespace) -> None:
    """Add the texts of a token store, as many as the run needs, to the table of datasets."""
    from datasets import Dataset
    from torchtitan.hf_datasets import DatasetConfig
    from torchtitan.hf_datasets.text_datasets import DATASETS

    texts = read_texts(args.tokens, args.model, args.batch * args.length * args.steps)
    DATASETS[_NAME] = DatasetConfig(
        path=_NAME,
        loader=lambda path: Dataset.from_dict({"text": texts}),
        sample_processor=lambda sample: sample["text"],
    )


def read_texts(store_dir: Path, model: Path, count: int) -> list[str]:
    """Return the texts of the first documents in a store that have `count` tokens together."""
    import numpy as np
    from tokenizers import Tokenizer

    from lib.tokens import store

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    split = store.open_store(store_dir).splits["train"]
    ends = split.ends[:]
    needed = int(np.searchsorted(ends, count)) + 1
    starts = [0, *ends[:-1][:needed].tolist()]
    return [
        tokenizer.decode(split.tokens[start:end].tolist())
        for start, end in zip(starts, ends[:needed].tolist(), strict=False)
    ]


if __name__ == "__main__":
    main()
