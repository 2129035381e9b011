"""Train a tiny model with divided rows, uncompiled and compiled; each rank runs this.

On the last rank, the compiler fails in some cases. argv: a directory for `<rank>.json`, the ranks
that share a row, and names of CASES. The file contains for each case the results of uncompiled and
compiled training (losses of training and evaluation, exchanges per step, bytes that a step keeps
for its backward pass), the numbers of graphs that were compiled and of calls that were tried, the
warnings, and the error.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager_decomp_partition
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lib.core.errors import UsageError
from lib.parallel import compiling, context, parallelize
from lib.parallel.compiling import Compiler, make_compiler
from lib.parallel.degrees import Degrees
from lib.parallel.layout import ParallelLayout
from lib.parallel.loss import token_loss_sum
from lib.parallel.trial import eval_mode, require_isolation
from lib.tokens.batches import MicroBatch, make_micro_batch
from lib.tokens.samples import SampleArrays
from tests.models.families import make_tiny_llama

LENGTH = 24
# The lengths of documents in each batch: their number and the longest one change.
DOCUMENTS = [(5, 9, 10), (24,), (2, 3, 4, 15), (12, 12)]
# What fails on the last rank: the compiler, for calls with or without gradients, or a kernel.
TRAINING = "training"
EVALUATION = "evaluation"
KERNEL = "kernel"


class Case(NamedTuple):
    """A training. fails: what fails, "" for nothing. required: as with --compile on."""

    recompute: str = "none"
    fails: str = ""
    required: bool = False
    attention: str = "varlen"


CASES = {
    "none": Case(),
    "selective": Case("selective"),
    "full": Case("full"),
    "masks": Case("full", attention="sdpa"),
    "fails in training": Case("selective", TRAINING),
    "fails in evaluation": Case("full", EVALUATION),
    "does not start": Case("none", KERNEL),
    "required": Case("full", TRAINING, required=True),
}


class ExchangeCount(TorchDispatchMode):
    """Counts the exchanges of tokens that take place."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile inside this mode."""
        return True

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        exchanges = ("all_to_all_single", "all_gather_into_tensor")
        namespace, _, name = function.name().partition("::")
        self.number += namespace == "_c10d_functional" and name.partition(".")[0] in exchanges
        return function(*args, **(kwargs or {}))


def fail(*_: Any) -> Any:
    raise RuntimeError("type fp8e4nv not supported")


def make_batches(layout: ParallelLayout) -> list[MicroBatch]:
    """Return a batch for each row of DOCUMENTS; groups of ranks that share rows get others."""
    draw = np.random.default_rng(layout.dp_rank)
    batches = []
    for lengths in DOCUMENTS[layout.dp_rank :] + DOCUMENTS[: layout.dp_rank]:
        tokens = draw.integers(0, 96, (2, LENGTH + 1))
        positions = np.tile(np.concatenate([np.arange(length) for length in lengths]), (2, 1))
        rows = SampleArrays(tokens[:, :-1], tokens[:, 1:], positions)
        batches.append(make_micro_batch(rows, pin=False).to(layout))
    return batches


def train_steps(layout: ParallelLayout, case: Case, compiler: Compiler | None) -> dict[str, Any]:
    """Return losses, summed over ranks, and the exchanges and kept bytes of the last step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        make_tiny_llama(), attn_implementation=case.attention, dtype=torch.float32
    )
    parallelize.parallelize(model, layout.fsdp, "fp32", case.recompute, compiler)
    require_isolation(model, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in make_batches(layout):
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with ExchangeCount() as exchanges:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = token_loss_sum(model, batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        with torch.no_grad(), eval_mode(model):
            losses += [loss.item(), token_loss_sum(model, batch).item()]
    return {
        "losses": layout.sum_over_ranks(losses),
        "exchanges": exchanges.number,
        "kept": sum(tensor.untyped_storage().nbytes() for tensor in kept.values()),
    }


@contextmanager
def stand_in(fails: str) -> Iterator[dict[str, int]]:
    """Count graphs and trials, and let the compiler fail."""
    counts = {"graphs": 0, "trials": 0}

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        counts["graphs"] += 1
        if fails == (TRAINING if torch.is_grad_enabled() else EVALUATION):
            fail()
        return fail if fails == KERNEL else aot_eager_decomp_partition(graph, inputs)

    real = compiling._rehearse_call

    def rehearse(*arguments: Any) -> None:
        counts["trials"] += 1
        real(*arguments)

    torch._dynamo.reset()
    with (
        mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)),
        mock.patch.object(compiling, "_rehearse_call", rehearse),
    ):
        yield counts


def compare(layout: ParallelLayout, case: Case) -> dict[str, Any]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger().addHandler(handler)
    results: dict[str, Any] = {"uncompiled": train_steps(layout, case, None), "error": ""}
    fails = case.fails if layout.rank == layout.ranks - 1 else ""
    compiler = make_compiler(True, layout.device, layout)
    assert compiler is not None
    compiler._required = case.required
    with stand_in(fails) as counts:
        try:
            results["compiled"] = train_steps(layout, case, compiler)
        except UsageError as error:
            results["error"] = error.render()
    logging.getLogger().removeHandler(handler)
    warnings = [text for text in messages if text.startswith("compile:")]
    return {**results, **counts, "warnings": warnings}


def main() -> None:
    directory, shared, *names = sys.argv[1:]
    method = context.choose_method("auto", int(shared), make_tiny_llama())
    layout = ParallelLayout.start(Degrees(None, int(shared), method))
    results = {name: compare(layout, CASES[name]) for name in names or CASES}
    (Path(directory) / f"{layout.rank}.json").write_text(json.dumps(results))
    layout.stop()


if __name__ == "__main__":
    main()
