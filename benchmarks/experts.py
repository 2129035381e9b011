#!/usr/bin/env python3
"""Compare the pipeline's function for experts with those of transformers, forward and backward.

  python benchmarks/experts.py                   # a layer like Mixtral's on the CPU, a minute
  python benchmarks/experts.py --device cuda --dtype bfloat16 --tokens 16384 --hidden 2048 \\
      --width 768 --experts 128 --choices 8      # a layer of Qwen3-30B-A3B
  python benchmarks/experts.py --device cuda --dtype bfloat16 --compile --biases    # like gpt-oss

All functions run in one process, on the same tokens and weights. Time: the fastest round. On a CPU
this is the processor time of one thread, so other processes do not affect it; on a GPU it is the
time between events. Memory (GPU only): the peak of the allocator minus weights and inputs.
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
    """Print a table: for each function forward, backward, both, and the ratio to the pipeline's."""
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
    compare_functions(args)


def compare_functions(args: argparse.Namespace) -> None:
    """Time forward and backward of each function, and print the table."""
    import torch

    from lib.parallel import experts

    torch.set_num_threads(1)
    module, inputs = make_layer(args)
    on_gpu = args.device.startswith("cuda")
    round_numbers = range(args.rounds + 2)  # the first two compile and warm up
    best_ms: dict[str, list[float]] = {}
    for name in (experts.NAME, "grouped_mm", "eager"):
        if args.compile and name == "eager":
            continue  # it synchronises with the device in each layer, which a graph cannot
        module.config._experts_implementation_internal = name
        torch._dynamo.reset()
        step = make_step(module, inputs, args.compile, on_gpu)
        rounds_ms = [step() for _ in round_numbers][2:]
        best_ms[name] = min(rounds_ms, key=sum)
        if on_gpu:
            best_ms[name].append(measure_peak(step))
    device_name = torch.cuda.get_device_name() if on_gpu else f"{platform.machine()}, 1 thread"
    print(
        f"{args.tokens:,} tokens, {args.experts} experts, {args.choices} per token, hidden "
        f"{args.hidden}, width {args.width}, {args.dtype}, {device_name}"
        f"{', compiled' if args.compile else ''}"
    )
    print("| function | forward | backward | both | to the first |\n|---|---|---|---|---|")
    first_total = sum(best_ms[experts.NAME][:2])
    for name, (forward, backward, *memory) in best_ms.items():
        total = forward + backward
        print(
            f"| {name} | {forward:.2f} ms | {backward:.2f} ms | {total:.2f} ms | "
            f"{total / first_total:.3f} |"
            + "".join(f" {size / 2**20:,.0f} MiB |" for size in memory)
        )


def make_layer(args: argparse.Namespace) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return the experts of a layer, and their inputs: hidden states, chosen experts, weights."""
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
    tensor_options = {"device": args.device, "dtype": getattr(torch, args.dtype)}
    module = (
        GptOssExperts(GptOssConfig(**sizes))
        if args.biases
        else MixtralExperts(MixtralConfig(**sizes))
    ).to(**tensor_options)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.02)
    scores = torch.randn(args.tokens, args.experts, device=args.device).softmax(-1)
    weights, choices = scores.topk(args.choices, -1)
    hidden = torch.randn(args.tokens, args.hidden, **tensor_options)
    return module, (
        hidden.requires_grad_(),
        choices,
        weights.to(tensor_options["dtype"]).requires_grad_(),
    )


def make_step(
    module: Any, inputs: tuple[Any, Any, Any], compiled: bool, on_gpu: bool
) -> Callable[[], list[float]]:
    """Return a function that runs forward and backward, and returns the milliseconds of each."""
    import torch

    forward = torch.compile(module, dynamic=False) if compiled else module
    output_gradient = torch.randn_like(inputs[0])

    def now() -> Any:
        if not on_gpu:
            return time.process_time()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def step() -> list[float]:
        times = [now()]
        output = forward(*inputs)
        times.append(now())
        output.backward(output_gradient)
        times.append(now())
        for part in (*inputs[::2], *module.parameters()):
            part.grad = None
        if on_gpu:
            torch.cuda.synchronize()
            return [times[0].elapsed_time(times[1]), times[1].elapsed_time(times[2])]
        return [1000 * (times[1] - times[0]), 1000 * (times[2] - times[1])]

    return step


def measure_peak(step: Callable[[], list[float]]) -> float:
    """Return the bytes that a step allocates at its peak."""
    import torch

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


if __name__ == "__main__":
    main()
