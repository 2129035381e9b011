"""Train a tiny model uncompiled and compiled, with failures on the last rank; each rank runs this.

On the last rank, compiling the loss and the update of the optimizer fails. argv: a directory for
`<rank>.json`: the losses of both runs, the number of compiled blocks that ran, and the warnings.

"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.optim import adamw8bit, registry
from lib.optim.guard import StepGuard
from lib.parallel import loss, parallelize
from lib.parallel.compiling import Compiler, make_compiler
from lib.parallel.layout import ParallelLayout
from lib.tokens.batches import MicroBatch
from tests.models.families import make_tiny_llama

STEPS = 3


def fail_to_compile(*_: Any) -> None:
    """Raise what a compiler that knows no 8-bit floats may raise."""
    raise RuntimeError("type fp8e4nv not supported")


def train_steps(layout: ParallelLayout, compiler: Compiler | None) -> list[float]:
    """Return the loss of each step, summed over ranks. All ranks must call this."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_tiny_llama())
    parallelize.parallelize(model, layout.fsdp, "fp32", compiler=compiler)
    wrap = compiler.for_part("the update").wrap if compiler else None
    adamw = registry.build_optimizer("adamw8bit", model, 1e-2, wrap=wrap)
    guard = StepGuard("fp32", 30.0, layout.device, layout.ranks)
    compute_loss = loss.build_loss(model, layout, "concat", compiler)
    tokens = torch.randint(
        0, 96, (STEPS, layout.ranks, 2, 33), generator=torch.Generator().manual_seed(1)
    )[:, layout.rank]
    losses = []
    for step in range(STEPS):
        batch = MicroBatch(tokens[step, :, :-1], tokens[step, :, 1:])
        scaled = guard.scale_for(64 * layout.ranks)
        total = compute_loss(batch, scaled.loss)
        total.backward()
        guard.clip(adamw, 1.0, scaled)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        losses.append(layout.sum_over_ranks([total.item()])[0])
    return losses


def main() -> None:
    """Train uncompiled and compiled."""
    layout = ParallelLayout.start()
    real = torch.compile
    calls = [0]
    messages = []
    may_fail = (loss._fused, adamw8bit._apply_step) if layout.rank == layout.ranks - 1 else ()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            calls[0] += any("attention" in str(node.target) for node in graph.graph.nodes)
            return graph.forward(*arguments)

        return run

    def compile_(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return (
            fail_to_compile if function in may_fail else real(function, backend=backend, **options)
        )

    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    expected = train_steps(layout, None)
    with mock.patch.object(torch, "compile", compile_):
        compiled_losses = train_steps(layout, make_compiler(True, layout.device))
    (Path(sys.argv[1]) / f"{layout.rank}.json").write_text(
        json.dumps(
            {
                "uncompiled": expected,
                "compiled": compiled_losses,
                "blocks": calls[0],
                "warnings": [text for text in messages if text.startswith("compile:")],
            }
        )
    )
    layout.stop()


if __name__ == "__main__":
    main()
