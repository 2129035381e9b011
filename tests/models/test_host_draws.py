# covers: lib/models/host_draws.py
"""Weights are drawn on the host in pieces; a part of them is the same as in the whole."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lib.models import host_draws
from lib.models.host_draws import HostDraws, list_pieces

SHAPE = (6, 5, 4)
WHOLE = tuple(slice(0, size) for size in SHAPE)
PARTS = [
    WHOLE,
    (slice(2, 4), slice(0, 5), slice(0, 4)),
    (slice(0, 6), slice(3, 5), slice(0, 4)),
    (slice(0, 6), slice(0, 5), slice(1, 2)),
    (slice(1, 2), slice(2, 3), slice(3, 4)),
    (slice(6, 6), slice(0, 5), slice(0, 4)),
]

Rule = Callable[[Tensor], object]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw pieces of seven elements, which no dimension divides into."""
    monkeypatch.setattr(host_draws, "PIECE", 7)


def draw(rule: Rule, part: tuple[slice, ...] = WHOLE, seed: int = 0, threads: int = 1) -> Tensor:
    """Return a tensor after a rule has initialised it, with NaN where nothing was drawn."""
    weight = nn.Parameter(torch.full(SHAPE, torch.nan), requires_grad=False)
    with ThreadPoolExecutor(threads) as pool:
        draws = HostDraws(seed, pool)
        draws.begin({weight: part})
        with torch.no_grad(), draws:
            rule(weight)
    return weight.detach()


def zero_a_row(weight: Tensor) -> None:
    nn.init.normal_(weight, std=0.5)
    weight[3].zero_()


def zero_a_row_and_read(weight: Tensor) -> None:
    zero_a_row(weight)
    weight.data /= weight.norm()


def draw_twice(weight: Tensor) -> None:
    nn.init.normal_(weight)
    nn.init.uniform_(weight, -3, -1)


def draw_each(weight: Tensor) -> None:
    nn.init.normal_(weight)
    for i in range(0, 6, 2):
        weight[i].uniform_(1, 2)
        weight[:, 1].normal_()


RULES: list[Rule] = [
    nn.init.normal_,
    nn.init.kaiming_uniform_,
    nn.init.trunc_normal_,
    nn.init.orthogonal_,
    zero_a_row,
    zero_a_row_and_read,
    draw_twice,
    draw_each,
]


@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_part_is_the_same_as_in_the_whole(rule: Rule, part: tuple[slice, ...]) -> None:
    expected = draw(rule)
    assert not expected.isnan().any()
    assert torch.equal(draw(rule, part, threads=3)[part], expected[part])


@pytest.mark.parametrize("part", PARTS, ids=range(len(PARTS)))
def test_only_the_pieces_of_a_part_are_drawn(part: tuple[slice, ...]) -> None:
    is_inside = torch.zeros(SHAPE, dtype=torch.bool)
    is_inside[part] = True
    expected = sorted({i // 7 for i in is_inside.flatten().nonzero().flatten().tolist()})
    assert list_pieces(SHAPE, part) == expected
    drawn = ~draw(nn.init.normal_, part).isnan().flatten()
    assert sorted({i // 7 for i in drawn.nonzero().flatten().tolist()}) == expected


def test_a_number_without_dimensions_is_one_piece() -> None:
    assert list_pieces((), ()) == [0]


def test_the_key_and_the_order_decide_and_global_states_stay() -> None:
    before = torch.get_rng_state()
    first = draw(nn.init.normal_)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, draw(nn.init.normal_))
    assert not torch.equal(first, draw(nn.init.normal_, seed=1))
    second = draw(lambda weight: [nn.init.normal_(weight) for _ in range(2)])
    assert not torch.isin(second, first).any()


def test_numbers_have_the_distribution_of_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_draws, "PIECE", 1 << 10)
    values = torch.empty(200, 500)
    with ThreadPoolExecutor(2) as pool, HostDraws(0, pool):
        values.normal_(1.0, 0.02)
        assert values.mean().item() == pytest.approx(1, abs=3e-4)
        assert values.std().item() == pytest.approx(0.02, rel=0.01)
        assert np.corrcoef(values[:100].flatten(), values[100:].flatten())[0, 1] < 0.02
        values.uniform_(-1, 3)
    assert values.min() >= -1 and values.max() <= 3
    assert values.mean().item() == pytest.approx(1, abs=0.02)


def test_other_dtypes_and_layouts_round_the_same_numbers() -> None:
    values = draw(nn.init.normal_)
    half = torch.empty(SHAPE, dtype=torch.bfloat16)
    turned = torch.empty(SHAPE[::-1]).permute(2, 1, 0)
    for tensor in (half, turned):
        with ThreadPoolExecutor(1) as pool, HostDraws(0, pool):
            tensor.normal_()
        assert torch.equal(tensor, values.to(tensor.dtype))


def test_a_generator_of_the_rule_and_other_devices_are_left_to_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.empty(3).normal_(generator=torch.Generator().manual_seed(0))
    drawn = draw(lambda weight: weight.view(-1)[:3].normal_(generator=generator))
    assert torch.equal(drawn.flatten()[:3], expected)
    assert draw(lambda _: torch.empty(3, device="meta").normal_()).isnan().all()
