"""Continue prompts with a sharded model, with the same number of forward passes on all ranks.

Each rank computes all prompts in one padded batch of a fixed shape, and chooses the same tokens.
There is no cache and no early exit: a forward pass gathers the weights of all ranks, so a rank that
stopped earlier would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lib.core import units
from lib.parallel import attention
from lib.parallel.trial import SingleDevice, trial_mode
from lib.tokens.batches import Rank, make_micro_batch
from lib.tokens.samples import IGNORED, SampleArrays

_MULTIPLE = 16  # tokens of a row; products in 8 bits need such sizes


def choose_length(prompts: Sequence[Sequence[int]], tokens: int, longest: int) -> int:
    """Return the tokens of a row that contains the longest prompt and its continuation."""
    needed = max(map(len, prompts)) + tokens
    return max(needed, min(longest, _MULTIPLE * units.ceil_div(needed, _MULTIPLE)))


def continue_prompts(
    model: PreTrainedModel,
    rank: Rank,
    prompts: Sequence[Sequence[int]],
    uniforms: np.ndarray,
    length: int,
    with_positions: bool,
    advance: Callable[[], object] = lambda: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the most likely continuation and a drawn one of each prompt, int64 [prompts, tokens].

    All ranks must call this. prompts: token ids. uniforms: float64 [prompts, tokens], numbers in
    [0, 1) that decide the drawn tokens. length: of a row, see `choose_length`. with_positions: the
    run packs documents, so its batches contain positions. advance: called after each forward pass;
    it may raise an error, on all ranks after the same pass. The state of the model and the global
    random state do not change.
    """
    count, tokens = uniforms.shape
    rows = np.zeros((2 * count, length), np.int64)
    ends = np.array([len(prompt) for prompt in [*prompts, *prompts]])
    for row, prompt in zip(rows, [*prompts, *prompts], strict=True):
        row[: len(prompt)] = prompt
    positions = np.tile(np.arange(length), (2 * count, 1)) if with_positions else None
    labels = np.full_like(rows, IGNORED)
    with trial_mode(model):
        for number in range(tokens):
            batch = make_micro_batch(SampleArrays(rows, labels, positions), False)
            batch = batch.to(SingleDevice(rank.device))  # whole rows: they are short
            places = torch.from_numpy(ends - 1 + number).to(rank.device)
            with _keep_logits(model, places) as select:
                logits = select(model(**attention.make_inputs(model, batch)).logits)
            chosen = logits[:count].argmax(-1).cpu().numpy()
            drawn = draw_tokens(logits[count:].float().cpu().numpy(), uniforms[:, number])
            rows[np.arange(2 * count), ends + number] = np.concatenate([chosen, drawn])
            advance()
    new = rows[np.arange(2 * count)[:, None], ends[:, None] + np.arange(tokens)]
    return new[:count], new[count:]


def draw_tokens(logits: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
    """Return a token of each row, drawn from the softmax of its logits, int64 [rows].

    logits: float32 [rows, V]. uniforms: float64 [rows]. The draw inverts the cumulative
    distribution on the host, so it needs no random state of a device.
    """
    scores = np.where(np.isnan(logits), -np.inf, logits.astype(np.float64))
    largest = np.maximum(scores.max(-1, keepdims=True), np.finfo(float).min)
    reached = np.cumsum(np.exp(scores - largest), axis=-1)
    drawn = (reached <= uniforms[:, None] * reached[:, -1:]).sum(-1)
    return np.minimum(drawn, logits.shape[1] - 1)


@contextmanager
def _keep_logits(model: PreTrainedModel, places: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
    """Let the output layer compute the logits of one place in each row.

    places: int64 [B]. Yields a function that returns the logits [B, V] from those of the model. The
    logits of a whole batch could take gigabytes.
    """
    head = model.get_output_embeddings()
    own_forward = head.__dict__.get("forward")
    compute = head.forward
    rows = torch.arange(len(places), device=places.device)

    def forward(hidden: Tensor) -> Tensor:
        return compute(hidden[rows, places][:, None])

    def select(logits: Tensor) -> Tensor:
        return logits[:, 0] if logits.shape[1] == 1 else logits[rows, places]

    head.forward = forward
    try:
        yield select
    finally:
        del head.forward
        if own_forward is not None:
            head.forward = own_forward
