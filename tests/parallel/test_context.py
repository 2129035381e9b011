# covers: lib/parallel/context.py, lib/parallel/context_trial.py, lib/tokens/batches.py
"""Ranks that share rows compute the losses and gradients of whole rows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask
from transformers import PretrainedConfig

from lib.core.errors import UsageError
from lib.parallel import context, varlen
from lib.parallel.context import Context
from lib.parallel.degrees import ALLGATHER, ULYSSES
from lib.tokens.batches import MicroBatch, cut_array, make_micro_batch
from lib.tokens.samples import IGNORED, SampleArrays
from tests.conftest import run_stage
from tests.models.families import FAMILIES
from tests.parallel import dividing

FEW = ("llama, packed", "one key head", "mistral", "gpt-oss, packed", "flash, packed")


def divide(
    where: Path, ranks: int, shard: int, size: int, method: str, *names: str
) -> dict[str, Any]:
    """Return the results of tests/parallel/dividing.py."""
    arguments = (where / "results.json", shard, size, method, *names)
    run_stage("tests/parallel/dividing.py", *arguments, cwd=where, ranks=ranks)
    return json.loads((where / "results.json").read_text())


def check_numbers(results: dict[str, Any]) -> None:
    for name, found in results.items():
        assert found["loss"] < 2e-6, name  # of 4.6 nats: 3e-7 of the loss is a rounding
        assert found["norm"] < 1e-6 and found["gradient"] < 1e-6, name


@pytest.mark.parametrize(
    "ranks, shard, size, method",
    [
        (2, 2, 2, ULYSSES),
        (3, 3, 3, ALLGATHER),
        pytest.param(4, 2, 2, ULYSSES, marks=pytest.mark.slow),
        pytest.param(4, 1, 2, ALLGATHER, marks=pytest.mark.slow),
    ],
)
def test_loss_norm_and_gradients_are_those_of_whole_rows(
    tmp_path: Path, ranks: int, shard: int, size: int, method: str
) -> None:
    """Also with two groups of ranks, in one replica of the model or several."""
    check_numbers(divide(tmp_path, ranks, shard, size, method, *FEW))


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, shard, size, method",
    [
        (2, 2, 2, ULYSSES),
        (4, 4, 4, ULYSSES),
        (4, 4, 4, ALLGATHER),
        pytest.param(4, 2, 2, ULYSSES, marks=pytest.mark.long),
        pytest.param(4, 1, 2, ALLGATHER, marks=pytest.mark.long),
        pytest.param(3, 3, 3, ALLGATHER, marks=pytest.mark.long),
    ],
)
def test_every_family_is_divided_in_every_way(
    tmp_path: Path, ranks: int, shard: int, size: int, method: str
) -> None:
    results = divide(tmp_path, ranks, shard, size, method)
    assert results.keys() == dividing.CASES.keys()
    check_numbers(results)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_step_sends_as_many_bytes_as_the_formula_says(tmp_path: Path, ranks: int) -> None:
    """Per layer and direction: (N - 1)/N · B · s · D · 4 bytes · (2 Hq + 2 lcm(Hkv, N))."""
    names = ("llama, varlen", "one key head", "full")
    results = divide(tmp_path, ranks, ranks, ranks, ULYSSES, *names)
    for name, keys, passes in zip(names, (2, 1, 2), (2, 2, 3), strict=True):
        share = math.ceil(dividing.LENGTH / ranks)
        heads = 2 * 4 + 2 * math.lcm(keys, ranks)
        one = (ranks - 1) / ranks * dividing.ROWS * share * 8 * 4 * heads
        tokens = dividing.ROWS * share
        config = dividing.CASES[name].config
        assert one == 4 * context.count_sent(ULYSSES, ranks, config, tokens)
        assert results[name]["sent"] == one * passes * 2, name  # two layers


def test_models_that_cannot_be_divided_are_refused_by_name(tmp_path: Path) -> None:
    errors = divide(tmp_path, 2, 2, 2, ULYSSES, *dividing.REFUSED)
    for name, error in errors.items():
        assert dividing.REFUSED[name].config.model_type in error, name
    assert "longest document" in errors["frequencies by length"]
    assert "interface" in errors["own attention"] and "interface" in errors["arguments dropped"]
    assert "other results" in errors["positions counted"]
    assert "places of queries" in errors and "count" in errors["places of queries"]


def test_a_broken_exchange_is_found_before_training(tmp_path: Path) -> None:
    errors = divide(tmp_path, 2, 2, 2, ULYSSES, *dividing.BROKEN)
    assert "other results" in errors["nothing exchanged"]
    assert "see each other" in errors["documents mixed"]


@pytest.mark.parametrize(
    "option, size, heads, method",
    [
        ("auto", 4, 32, ULYSSES),
        ("auto", 8, 28, ALLGATHER),
        ("ulysses", 7, 28, ULYSSES),
        ("allgather", 4, 32, ALLGATHER),
    ],
)
def test_the_method_follows_from_the_heads(option: str, size: int, heads: int, method: str) -> None:
    config = FAMILIES["qwen2"](num_attention_heads=heads, hidden_size=heads * 8)
    assert context.choose_method(option, size, config) == method


def test_an_error_lists_the_degrees_that_a_model_allows() -> None:
    config = FAMILIES["qwen2"](num_attention_heads=14, hidden_size=14 * 8)
    with pytest.raises(UsageError) as caught:
        context.choose_method("ulysses", 4, config)
    assert "--context-parallel 2, 7, 14" in caught.value.render()
    assert "--context-parallel-method allgather" in caught.value.render()


class Part(Context):
    """A part of a row, without a process group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


def make_rows(packed: bool) -> MicroBatch:
    tokens = np.arange(1, 23).reshape(2, 11)
    positions = np.array([[*range(4), *range(6)]] * 2) if packed else None
    lengths = None if packed else np.array([10, 7])
    return make_micro_batch(
        SampleArrays(tokens[:, :-1], tokens[:, 1:], positions, lengths), pin=False
    )


@pytest.mark.parametrize("packed", [False, True])
def test_rows_are_cut_after_labels_and_boundaries_are_made(packed: bool) -> None:
    """Three ranks share ten tokens: two tokens without labels are a document of their own."""
    whole = make_rows(packed)
    parts = [whole.divide(Part(rank, 3)) for rank in range(3)]
    tokens, labels, positions = (
        torch.cat([getattr(part, name) for part in parts], dim=1)
        for name in ("input_ids", "labels", "position_ids")
    )
    assert torch.equal(tokens[:, :10], whole.input_ids)
    assert torch.equal(labels[:, :10], whole.labels) and (labels[:, 10:] == IGNORED).all()
    first = [*range(4), *range(6)] if packed else [*range(10)]
    assert positions.tolist() == [[*first, 0, 1]] * 2
    for part in parts:
        assert part.input_ids.shape == (2, 4) and part.row_length == 12
        assert part.divide(Part(0, 3)) is part
        if packed:
            assert part.boundaries.tolist() == [0, 4, 10, 12, 16, 22, 24]
            assert part.row_positions.tolist() == [[*first, 0, 1]] * 2
    lengths = [[10, 10]] if packed else [[10, 7]]
    assert torch.stack([part.lengths for part in parts]).sum(0).tolist() == lengths[0]


def test_numbers_of_labels_are_cut_like_the_labels() -> None:
    rows = np.arange(20).reshape(2, 10)
    parts = [cut_array(rows, Part(rank, 3), -1) for rank in range(3)]
    assert np.array_equal(np.concatenate(parts, 1)[:, :10], rows)
    assert (np.concatenate(parts, 1)[:, 10:] == -1).all()
    assert cut_array(rows, None, -1) is rows


def test_kernels_for_documents_see_the_last_queries_of_a_document() -> None:
    """Attention of every rank's queries, by the boundaries that it computes, is that of all."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, heads, 12, 8) for heads in (4, 2, 2))
    ends = torch.tensor([0, 5, 12, 14, 14, 24], dtype=torch.int32)
    for window in (None, 4):
        whole, _ = varlen.attend_varlen(
            nn.Identity(), query, key, value, None, sliding_window=window, cu_seq_lens_q=ends
        )
        parts = []
        for rank in range(3):
            queries, keys = Part(rank, 3)._cut_documents(ends, 2, 4)
            part = query[:, :, 4 * rank : 4 * rank + 4]
            out, _ = varlen.attend_varlen(
                nn.Identity(),
                part,
                key,
                value,
                None,
                sliding_window=window,
                cu_seq_lens_q=queries,
                cu_seq_lens_k=keys,
                max_length_q=12,
            )
            parts.append(out)
        torch.testing.assert_close(torch.cat(parts, 1), whole)


def test_a_mask_of_flex_is_cut_for_the_queries_of_a_rank() -> None:
    """Its function gets the places of queries in the whole row."""

    def allows(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < 3)

    whole = create_block_mask(allows, None, None, 12, 12, "cpu")
    batch = make_rows(packed=True).divide(Part(2, 3))
    part = Part(2, 3)._cut_mask(whole, batch)
    assert part.shape == (2, 1, 4, 12)
    places = torch.arange(4)[:, None], torch.arange(12)
    mine = part.mask_mod(torch.tensor(0), torch.tensor(0), *places)
    assert torch.equal(mine, allows(None, None, places[0] + 8, places[1]))


def test_functions_without_a_divided_row_get_their_arguments_as_they_were_given() -> None:
    """Some families name the mask, others do not."""

    def attend(*arguments: Any, **named: Any) -> Any:
        return arguments, named

    wrapped = context._divide(attend)
    for arguments, named in ((("module", 1, 2, 3, None), {}), (("module", 1, 2, 3), {"mask": 4})):
        assert wrapped(*arguments, **named) == (arguments, named)


def test_heads_without_a_number_in_the_config_leave_the_choice_to_the_trial() -> None:
    assert context.choose_method("auto", 3, PretrainedConfig()) == ULYSSES
