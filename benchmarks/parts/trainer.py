"""Train with `transformers.Trainer` on each rank, for benchmarks/train.py."""

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
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.parallel import precision
from lib.planning import capacity
from lib.tokens import store
from lib.tokens.samples import Windows


def main() -> None:
    """Run one rank of the Trainer, with the model, tokens and optimizer of stage 04."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path)
    for name in ("batch", "length", "steps"):
        parser.add_argument(f"--{name}", type=int)
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:  # what stage 04 does too; torchrun would leave one thread to each rank
        torch.set_num_threads(
            max(1, len(os.sched_getaffinity(0)) // int(os.environ["LOCAL_WORLD_SIZE"]))
        )
    tokens = store.open_store(next((args.work / ".cache" / "tokens").glob("data-*")))
    windows = Windows(tokens.splits["train"].tokens, args.length)

    class Data(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
            ids = torch.from_numpy(windows.read_windows(np.array([i]))[0, :-1])
            return {"input_ids": ids, "labels": ids}

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []
            self.last = 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds.append(now - (self.last or now))
            self.last = now

    clock = Clock()
    model = AutoModelForCausalLM.from_pretrained(args.work / "model", dtype=torch.float32)
    Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.work / "trainer"),
            per_device_train_batch_size=args.batch,
            max_steps=args.steps,
            bf16=precision.default_precision() == "bf16",
            use_cpu=not on_gpu,
            save_strategy="no",
            report_to=[],
            logging_steps=1,
            disable_tqdm=True,
            weight_decay=0.1,
            optim="adamw_torch_fused",
            ddp_find_unused_parameters=False,
        ),
        train_dataset=Data(),
        callbacks=[clock],
    ).train()
    if int(os.environ["RANK"]) == 0:
        peak = (
            capacity.memory_usage(torch.device("cuda" if on_gpu else "cpu"))["memory/peak_gib"]
            * 1024
        )
        (args.work / "trainer.json").write_text(
            json.dumps({"seconds": clock.seconds, "memory_mb": peak})
        )


if __name__ == "__main__":
    main()
