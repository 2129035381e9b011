"""Memory: what is reported, and what is said when there is too little."""

from __future__ import annotations

import pytest
import torch

from lib.train import memory


def test_figures_of_this_process() -> None:
    figures = memory.usage(torch.device("cpu"))
    assert 0 < figures["memory/current_gib"] <= figures["memory/peak_gib"] \
        < figures["memory/total_gib"]


def test_too_large_an_allocation_names_the_knobs() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    explained = memory.explained(caught.value)
    assert "--batch-size" in explained.expected and "allocate" in explained.found
    assert memory.explained(RuntimeError("shapes do not match")) is None
