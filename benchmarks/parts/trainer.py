"""Train with `transformers.Trainer` on each rank.

benchmarks/train.py and tests/gpu/peers.py compare its speed with that of stage 04.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers import TrainingArguments as Arguments

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.parallel import precision
from lib.planning import capacity
from lib.tokens import packing, store
from lib.tokens.samples import Windows

SYNC_FREQ = 5  # steps; on a GPU, seconds are exact for so many steps together


class Data(torch.utils.data.Dataset):
    """Reads samples of a token store: windows, or packed documents with their positions."""

    def __init__(self, tokens: Path, length: int, packed: bool) -> None:
        split = store.open_store(tokens).splits["train"]
        self._samples = (
            packing.pack_in_memory(split, length) if packed else Windows(split.tokens, length)
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        arrays = self._samples.read_samples(np.array([i]))
        ids = torch.from_numpy(np.array(arrays.inputs[0]))
        sample = {"input_ids": ids, "labels": ids}
        if arrays.positions is not None:  # transformers finds the documents by their positions
            sample["position_ids"] = torch.from_numpy(arrays.positions[0])
        return sample


class Clock(TrainerCallback):
    """Records the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available() and len(self.seconds) % SYNC_FREQ == SYNC_FREQ - 1:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds.append(now - (self._last or now))
        self._last = now


def main() -> None:
    """Run one rank of the Trainer, with the model, tokens and optimizer of stage 04."""
    args = _parse_arguments()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:  # what stage 04 does too; torchrun would leave one thread to each rank
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        )
    clock = Clock()
    Trainer(
        _make_model(args.model, args.lora),
        Arguments(
            output_dir=str(args.out.with_suffix("")),
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            bf16=precision.default_precision() == "bf16",
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            logging_steps=SYNC_FREQ if on_gpu else 1,
            dataloader_drop_last=True,
            disable_tqdm=True,
            weight_decay=0.1,
            optim="adamw_torch_fused",
            ddp_find_unused_parameters=False,
            torch_compile=args.form == "compiled",
            use_liger_kernel=args.form == "liger",
        ),
        train_dataset=Data(args.tokens, args.length, bool(args.packed)),
        callbacks=[clock],
    ).train()
    if int(os.environ.get("RANK", "0")) == 0:
        usage = capacity.memory_usage(torch.device("cuda" if on_gpu else "cpu"))
        args.out.write_text(
            json.dumps({"seconds": clock.seconds, "memory_mb": usage["memory/peak_gib"] * 1024})
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "tokens", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name in ("batch", "length", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--form", choices=("eager", "compiled", "liger"), default="eager")
    parser.add_argument(
        "--lora", type=int, default=0, help="rank of adapters; 0 trains all weights"
    )
    parser.add_argument("--packed", type=int, default=0, help="1: pack whole documents")
    return parser.parse_args()


def _make_model(directory: Path, lora_rank: int) -> torch.nn.Module:
    """Return the model, with random weights if its directory has none, with adapters if wanted."""
    is_half = lora_rank and precision.default_precision() == "bf16"  # frozen weights, as stage 04
    dtype = torch.bfloat16 if is_half else torch.float32
    if any(directory.glob("*.safetensors")):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    else:
        config = AutoConfig.from_pretrained(directory, use_cache=False)
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if lora_rank:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=lora_rank, lora_alpha=2 * lora_rank, target_modules="all-linear")
        model = get_peft_model(model, adapters)
    return model


if __name__ == "__main__":
    main()
