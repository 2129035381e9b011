#!/usr/bin/env python3
"""The pipeline's own function for experts against those of transformers: forward and backward.

  python benchmarks/experts.py                   # a layer like Mixtral's on the CPU, in a minute
  python benchmarks/experts.py --device cuda --dtype bfloat16 --tokens 16384 --hidden 2048 \\
      --width 768 --experts 128 --choices 8      # a layer of Qwen3-30B-A3B
  python benchmarks/experts.py --device cuda --dtype bfloat16 --compile --biases    # like gpt-oss

All functions take turns in one process, on the same tokens and weights. Time: the fastest of the
rounds; on a CPU the processor time of one thread, so that other processes do not count, on a GPU
the time between events. Memory (GPU only): the peak of the allocator, less weights and inputs.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main() -> None:
    """Print a table: each function, forward, backward, both, and the ratio to the own one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024, help="of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--choices", type=int, default=2, help="experts per token")
    parser.add_argument("--biases", action="store_true", help="a layer of gpt-oss, not of Mixtral")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    measure(args)


def measure(args: argparse.Namespace) -> None:
    """Time forward and backward of each function in turn, and print them."""
    import torch

    from lib.parallel import experts

    torch.set_num_threads(1)
    module, inputs = make_layer(args)
    on_gpu = args.device.startswith("cuda")
    rounds = range(args.rounds + 2)  # the first two compile and warm up
    best: dict[str, list[float]] = {}
    for name in (experts.NAME, "grouped_mm", "eager"):
        if args.compile and name == "eager":
            continue  # it reads numbers from the device in each layer
        module.config._experts_implementation_internal = name
        torch._dynamo.reset()
        step = make_step(module, inputs, args.compile, on_gpu)
        taken = [step() for _ in rounds][2:]
        best[name] = min(taken, key=sum)
        if on_gpu:
            best[name].append(peak(step))
    where = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, 1 thread"
    print(
        f"{args.tokens:,} tokens, {args.experts} experts, {args.choices} per token, hidden "
        f"{args.hidden}, width {args.width}, {args.dtype}, {where}"
        f"{', compiled' if args.compile else ''}"
    )
    print("| function | forward | backward | both | to the first |\n|---|---|---|---|---|")
    own = sum(best[experts.NAME][:2])
    for name, (forward, backward, *memory) in best.items():
        whole = forward + backward
        print(
            f"| {name} | {forward:.2f} ms | {backward:.2f} ms | {whole:.2f} ms | "
            f"{whole / own:.3f} |" + "".join(f" {size / 2**20:,.0f} MiB |" for size in memory)
        )


def make_layer(args: argparse.Namespace) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return the experts of a layer and what they are given: tokens, choices and weights."""
    import torch
    from transformers import GptOssConfig, MixtralConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.width,
        "num_local_experts": args.experts,
    }
    torch.manual_seed(0)
    kinds = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    module = (
        GptOssExperts(GptOssConfig(**sizes))
        if args.biases
        else MixtralExperts(MixtralConfig(**sizes))
    ).to(**kinds)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    scores = torch.randn(args.tokens, args.experts, device=args.device).softmax(-1)
    weights, choices = scores.topk(args.choices, -1)
    hidden = torch.randn(args.tokens, args.hidden, **kinds)
    return module, (hidden.requires_grad_(), choices, weights.to(kinds["dtype"]).requires_grad_())


def make_step(
    module: Any, inputs: tuple[Any, Any, Any], compiled: bool, on_gpu: bool
) -> Callable[[], list[float]]:
    """Return a function that computes once, and returns milliseconds of forward and backward."""
    import torch

    forward = torch.compile(module, dynamic=False) if compiled else module
    upstream = torch.randn_like(inputs[0])

    def now() -> Any:
        if not on_gpu:
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step() -> list[float]:
        at = [now()]
        out = forward(*inputs)
        at.append(now())
        out.backward(upstream)
        at.append(now())
        for part in (*inputs[::2], *module.parameters()):
            part.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            return [at[0].elapsed_time(at[1]), at[1].elapsed_time(at[2])]
        return [1000 * (at[1] - at[0]), 1000 * (at[2] - at[1])]

    return step


def peak(step: Callable[[], list[float]]) -> float:
    """Return the bytes that a step takes beside what was there before it."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
