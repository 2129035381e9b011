"""Divide rows of tokens over neighbouring ranks, with an exchange around attention.

Each of N ranks has s = T/N neighbouring tokens of a row of T. Only attention needs the others. The
first way, Ulysses (arXiv 2309.14509), exchanges tokens for heads, so that a kernel sees whole rows:

    queries [B, Hq, s, D]  --all-to-all-->  [B, Hq/N, T, D]  --kernel-->  back, by an all-to-all

The second way, for numbers of heads that N does not divide, keeps the queries and gathers all keys
and values; the kernel then computes s queries against T keys. Both work with every kernel, with
windows and with packed documents. All other parts of a model have to treat each token by itself,
which `context_trial.py` tries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import PretrainedConfig, PreTrainedModel, masking_utils

from lib.core import commands, log, units
from lib.core.errors import UsageError
from lib.core.options import AUTO
from lib.models.tensors import COMPUTE_DTYPES
from lib.parallel import attention
from lib.parallel.attention import Attend
from lib.parallel.degrees import ALLGATHER, ULYSSES
from lib.tokens.batches import MicroBatch

# The argument of attention functions that says how rows are divided: a Context, or None.
ARGUMENT = "context_parallel"
# Arguments of attention functions that contain a number for each head (the sinks of gpt-oss).
_PER_HEAD = ("s_aux",)

_rehearsals = 0


@contextmanager
def rehearsal() -> Iterator[None]:
    """Copy within this rank instead of exchanging: the shapes are right, the numbers are not.

    So one rank can try a block without waiting for the others.
    """
    global _rehearsals
    _rehearsals += 1
    try:
        yield
    finally:
        _rehearsals -= 1


def choose_method(option: str, size: int, config: PretrainedConfig) -> str:
    """Return the way in which ranks exchange tokens, for --context-parallel-method.

    option: the value of the option. size: number of ranks that share a row. Raises UsageError if
    `ulysses` is asked for and the ranks cannot share the heads.
    """
    heads = attention.get_field(config.get_text_config(), "num_attention_heads")
    if option == ALLGATHER or not isinstance(heads, int) or heads % size == 0:
        return ULYSSES if option == AUTO else option
    if option == AUTO:
        return ALLGATHER
    degrees = [str(degree) for degree in range(2, heads + 1) if heads % degree == 0]
    raise UsageError(
        f"--context-parallel {size} cannot divide the attention heads of this model",
        found=f"{units.counted(heads, 'head')} of queries in {config.model_type}",
        expected=f"--context-parallel {', '.join(degrees)}" if degrees else "",
        hint="allgather needs no division of heads:",
        run=commands.as_typed(
            "--context-parallel-method", ALLGATHER, drop=("--context-parallel-method",)
        ),
    )


class Context:
    """The ranks that share rows, and the exchanges between them.

    rank: the index of this rank among them. size: their number, N. method: ULYSSES or ALLGATHER.
    """

    def __init__(self, rank: int, size: int, method: str, group: dist.ProcessGroup) -> None:
        self.rank = rank
        self.size = size
        self.method = method
        self.group = group
        _wrap_attention()

    @torch.compiler.disable  # a compiler could change the order of exchanges, and ranks would hang
    def attend(
        self,
        attend: Attend,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        **named: Any,
    ) -> tuple[Tensor, None]:
        """Compute attention between all tokens of the rows, for the queries of this rank.

        query: [B, Hq, s, D]; key, value: [B, Hkv, s, D or V]; all else: see `make_inputs`.
        Returns [B, s, Hq, V].
        """
        if self.method == ALLGATHER:
            key, value = self._gather_tokens(key, value)
            return attend(module, query, key, value, attention_mask, **named)[0], None
        heads = query.shape[1]
        copies = math.lcm(key.shape[1], self.size) // key.shape[1]
        if copies > 1:  # autograd sums the gradients of the copies
            key, value = (part.repeat_interleave(copies, 1) for part in (key, value))
        query, key, value = self._exchange_heads(query, key, value)
        mine = slice(self.rank * heads // self.size, (self.rank + 1) * heads // self.size)
        named |= {name: named[name][mine] for name in _PER_HEAD if named.get(name) is not None}
        some_heads = _SomeHeads(module, mine, heads, query.shape[1] // key.shape[1])
        out, _ = attend(some_heads, query, key, value, attention_mask, **named)
        return self._exchange_tokens(out), None

    def make_inputs(
        self, model: PreTrainedModel, batch: MicroBatch, boundaries: Tensor | None
    ) -> dict[str, Any]:
        """Return the arguments of a model for a divided micro-batch, besides those of a whole one.

        boundaries: int32 [documents + 1], of the documents in the whole rows, for kernels that take
        them; None for kernels that take a mask. The mask is then that of the whole rows,
        [B, 1, T, T], and with ALLGATHER that of this rank's queries, [B, 1, s, T]. It is None, as
        in an undivided pass, for kernels that can do without one.
        """
        inputs: dict[str, Any] = {ARGUMENT: self}
        rows, share = batch.input_ids.shape
        if boundaries is None:
            inputs["attention_mask"] = self._make_mask(model, batch)
        elif self.method == ALLGATHER:
            queries, keys = self._cut_documents(boundaries, rows, share)
            for ends in (queries, keys):  # as in `attention.make_inputs`
                torch._dynamo.maybe_mark_dynamic(ends, 0)
            inputs |= {"cu_seq_lens_q": queries, "cu_seq_lens_k": keys}
        return inputs

    def _cut_documents(self, boundaries: Tensor, rows: int, share: int) -> tuple[Tensor, Tensor]:
        """Return where documents begin and end among this rank's queries, and among all keys.

        A document ends for the keys where the part of this rank ends, so that the last query of a
        document sees the last key. Documents outside the part have keys and no queries.

        boundaries: int32 [documents + 1]. Returns int32 [documents + 1 + B] twice.
        """
        length = share * self.size
        first = self.rank * share
        ends = torch.arange(rows, device=boundaries.device, dtype=boundaries.dtype) * length
        keys = torch.cat([boundaries, ends + first + share]).sort().values
        row = torch.div(keys, length, rounding_mode="floor")
        queries = row * share + (keys - row * length - first).clamp(0, share)
        return queries.to(torch.int32), keys

    def _make_mask(self, model: PreTrainedModel, batch: MicroBatch) -> Any:
        """Return the mask that the model would make for whole rows, or its part; see make_inputs.

        Families with layers of several kinds take a mask for each kind, in a dict.
        """
        shape = (len(batch.input_ids), batch.row_length, 0)
        embeddings = torch.empty(shape, dtype=model.dtype, device=batch.input_ids.device)
        masks = masking_utils.create_masks_for_generate(
            model.config, embeddings, None, None, position_ids=batch.row_positions
        )
        if self.method == ULYSSES:
            return masks
        cut = self._cut_mask
        if isinstance(masks, dict):
            return {kind: cut(mask, batch) for kind, mask in masks.items()}
        return cut(masks, batch)

    def _cut_mask(self, mask: Any, batch: MicroBatch) -> Any:
        """Return the rows of a mask for the queries of this rank. mask: None if it is causal."""
        rows, share = batch.input_ids.shape
        device = batch.input_ids.device
        length = batch.row_length
        first = self.rank * share
        if mask is None:
            causal = torch.ones(share, length, dtype=torch.bool, device=device).tril(first)
            return causal[None, None]
        if isinstance(mask, BlockMask):
            allows = mask.mask_mod

            def allows_here(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
                return allows(row, head, query + first, key)

            # Uncompiled, it would build the dense mask first.
            compiles = device.type == "cuda"
            return create_block_mask(
                allows_here, rows, None, share, length, device, _compile=compiles
            )
        return mask[:, :, first : first + share]

    def _exchange_heads(self, *parts: Tensor) -> list[Tensor]:
        """Return queries, keys and values of all tokens for this rank's share of the heads.

        parts: [B, H, s, D], H a multiple of N. Returns [B, H/N, T, D] each. All travel in one
        exchange.
        """
        rows, _, share, _ = parts[0].shape
        packed = torch.cat(
            [
                part.unflatten(1, (self.size, -1)).permute(1, 0, 3, 2, 4).flatten(3)  # [N, B, s, _]
                for part in parts
            ],
            dim=3,
        )
        received = _AllToAll.apply(packed, self.group)  # [N, B, s, _], N now the part of the row
        tokens = received.transpose(0, 1).reshape(rows, self.size * share, -1)
        sizes = [(part.shape[1] // self.size, part.shape[3]) for part in parts]
        return _split_heads(tokens, sizes)

    def _exchange_tokens(self, out: Tensor) -> Tensor:
        """Return all heads of this rank's tokens [B, s, H, D]. out: [B, T, H/N, D]."""
        packed = out.unflatten(1, (self.size, -1)).transpose(0, 1)  # [N, B, s, H/N, D]
        received = _AllToAll.apply(packed.contiguous(), self.group)  # N is now the part of heads
        return received.permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _gather_tokens(self, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return keys and values of all tokens, [B, H, T, D]. key, value: [B, H, s, D]."""
        packed = torch.cat([part.transpose(1, 2).flatten(2) for part in (key, value)], dim=2)
        sizes = [(part.shape[1], part.shape[3]) for part in (key, value)]
        return _split_heads(self.gather_rows(packed), sizes)

    def gather_rows(self, part: Tensor) -> Tensor:
        """Return whole rows [B, T, …] on each rank. part: this rank's tokens, [B, s, …]."""
        return _AllGather.apply(part.contiguous(), self.group).transpose(0, 1).flatten(1, 2)


def _split_heads(tokens: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the parts of packed tokens [B, T, _] as heads, [B, H, T, D] each.

    sizes: H and D of each part, in the order in which they were packed.
    """
    parts = tokens.split([heads * size for heads, size in sizes], dim=2)
    return [
        part.unflatten(2, size).transpose(1, 2) for part, size in zip(parts, sizes, strict=True)
    ]


def describe(
    shared: Context, config: PretrainedConfig, batch: int, length: int, precision: str
) -> str:
    """Return how ranks share rows, with the bytes that a rank sends, for the log.

    batch, length: rows of a micro-batch, and tokens of a row. precision: of --precision.
    """
    share = units.ceil_div(length, shared.size)
    text = f"rows of {length:,} tokens over {shared.size} ranks by {shared.method}, {share:,} each"
    if not (sent := count_sent(shared.method, shared.size, config, batch * share)):
        return text
    size = units.size(sent * COMPUTE_DTYPES[precision].itemsize)
    return f"{text}; a rank sends {size} per layer in a forward pass, and again in backward"


def count_sent(method: str, size: int, config: PretrainedConfig, tokens: int) -> int:
    """Return how many numbers a rank sends to others for attention, in a layer's forward pass.

    tokens: of this rank. Queries, keys, values and outputs travel, or keys and values to all other
    ranks. The backward pass sends as many. Returns 0 if the config does not contain the heads.
    """
    text = config.get_text_config()
    heads = attention.get_field(text, "num_attention_heads")
    keys = attention.get_field(text, "num_key_value_heads") or heads
    widths = attention.find_head_sizes(config)
    if not (isinstance(heads, int) and isinstance(keys, int) and widths.query):
        return 0
    if method == ALLGATHER:
        return (size - 1) * tokens * keys * (widths.query + widths.value)
    copies = math.lcm(keys, size)
    sent = tokens * (heads + copies) * (widths.query + widths.value)
    return sent * (size - 1) // size


def sum_over_group(value: Tensor, group: str) -> Tensor:
    """Return the sum of a tensor over the ranks of a group, by its name, without a gradient."""
    if _rehearsals:
        return value.clone()
    return wait(torch.ops._c10d_functional.all_reduce(value, "sum", group))


def start(rank: int, ranks: int, size: int, method: str) -> Context:
    """Return the context of a rank, and warn if rows are divided over several nodes.

    All ranks must call this, because it creates process groups. ranks: a multiple of size.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    if per_node % size and rank == 0:
        log.warn(
            f"--context-parallel {size} divides rows over several nodes, which have {per_node} "
            "ranks each: exchanges between nodes take several times longer than within one"
        )
    groups = [
        dist.new_group(list(range(first, first + size)), group_desc="context")
        for first in range(0, ranks, size)
    ]
    return Context(rank % size, size, method, groups[rank // size])


@cache
def _wrap_attention() -> None:
    """Let every attention function of this process exchange tokens, if a pass is divided."""
    attention.wrap_functions(_divide)


def _divide(attend: Attend) -> Attend:
    def attend_divided(*arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        context = named.pop(ARGUMENT, None)
        if context is None:
            return attend(*arguments, **named)
        return context.attend(attend, *arguments, **named)

    return attend_divided


class _SomeHeads:
    """An attention module as a kernel has to see it if it computes only some of the heads.

    Parameters with an entry for each head are cut; all else is that of the module.
    """

    def __init__(self, module: nn.Module, mine: slice, heads: int, groups: int) -> None:
        """mine: the heads to compute, of `heads`. groups: how many share a head of the keys."""
        self.num_key_value_groups = groups
        self._module = module
        self._mine = mine
        self._heads = heads

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if isinstance(value, Tensor) and value.shape[:1] == (self._heads,):
            return value[self._mine]
        return value


# Functional collectives, because selective checkpointing can keep their results.
class _AllToAll(torch.autograd.Function):
    """Exchanges the entries of the first dimension: entry n goes to rank n of the group.

    This is its own adjoint.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _exchange(tensor, group)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        return _exchange(upstream.contiguous(), ctx.group), None


class _AllGather(torch.autograd.Function):
    """Stacks the tensors of all ranks of a group; backward sums the gradients of the copies."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return [N, …]. tensor: […], contiguous."""
        ctx.group = group
        size = group.size()
        if _rehearsals:
            return tensor.expand(size, *tensor.shape).clone()
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(tensor, size, group.group_name)
        return wait(gathered).unflatten(0, (size, -1)) if tensor.ndim else wait(gathered)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        """Exchange the gradients and sum them in float32."""
        received = _exchange(upstream.contiguous(), ctx.group)
        return received.sum(0, dtype=torch.float32).to(upstream.dtype), None


def _exchange(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    if _rehearsals:
        return tensor.clone()
    ones = [1] * group.size()
    return wait(torch.ops._c10d_functional.all_to_all_single(tensor, ones, ones, group.group_name))


def wait(result: Tensor) -> Tensor:
    """Return the result of an exchange, whose later use waits for it, without a copy."""
    return torch.ops._c10d_functional.wait_tensor(result)
