# covers: lib/parallel/layout.py, lib/parallel/degrees.py
"""Ranks join their groups with the right timeouts, sockets and cores, up to a thousand ranks."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, PreTrainedModel

from lib.core import watchdog
from lib.core.errors import UsageError
from lib.core.paths import Experiment
from lib.parallel import loss, parallelize
from lib.parallel.layout import Degrees, ParallelLayout, _bind_to_near_cores
from lib.tokens.batches import MicroBatch
from lib.train import model
from lib.train.config import Config
from tests.models.families import make_tiny_llama


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return environment variables without those of torchrun."""
    variables = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    }
    monkeypatch.setattr(os, "environ", variables)
    return variables


@pytest.fixture
def leave_group() -> Iterator[None]:
    """Leave the process group that a test has joined, and restore the number of threads."""
    threads = torch.get_num_threads()
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


def tiny(tied: bool = False) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(
        make_tiny_llama(num_hidden_layers=3, tie_word_embeddings=tied)
    )


@pytest.mark.parametrize("minutes", [30.0, 0.0])
def test_the_watchdog_reports_before_a_collective_times_out(
    environment: dict[str, str], leave_group: None, minutes: float
) -> None:
    patience = watchdog.longest_section(minutes)
    layout = ParallelLayout.start(patience=patience)
    for group in (dist.group.WORLD, layout.fsdp.get_group(), layout.control, layout.saving):
        limit = group._get_backend(torch.device("cpu")).options._timeout
        assert limit >= max(timedelta(minutes=30), timedelta(seconds=patience + 60))
    assert environment["TORCH_GLOO_LAZY_INIT"] == "1" and environment["TORCH_FR_BUFFER_SIZE"]
    assert "expandable_segments:True" in environment["PYTORCH_ALLOC_CONF"]
    assert [layout.control.group_desc, layout.saving.group_desc] == ["control", "saving"]


def test_a_group_for_reductions_gets_the_same_timeout(
    environment: dict[str, str], leave_group: None
) -> None:
    layout = ParallelLayout.start(patience=3600.0)
    model = tiny()
    parallelize.shard(model, layout.fsdp, "fp32")
    assert parallelize.find_reduction_group(model) is None
    parallelize.separate_reductions(model)
    group = parallelize.find_reduction_group(model)
    if group is None:
        pytest.skip("this torch has no such group")
    layout.set_timeout(group)
    limit = group._get_backend(torch.device("cpu")).options._timeout
    assert limit == layout.timeout > timedelta(hours=1)


def test_the_allocator_is_configured_before_a_gpu_is_queried(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """torch reads the variable when it initialises CUDA, as any query of a GPU does."""
    seen: list[str] = []
    stage_04 = importlib.import_module("04_train_fsdp")

    def ask() -> bool:
        seen.append(environment["PYTORCH_ALLOC_CONF"])
        raise LookupError

    monkeypatch.setattr(torch.cuda, "is_available", ask)
    monkeypatch.setattr(model, "build_model", lambda *_: torch.cuda.is_available())
    output = SimpleNamespace(experiment=Experiment(tmp_path, "exp"))
    with pytest.raises(LookupError):
        stage_04.prepare_and_train(Config(), output, None)
    assert "expandable_segments:True" in seen[0]


@pytest.mark.filterwarnings("ignore:Set timeout is now only supported")
def test_a_thousand_ranks_start_in_replicas_of_eight(
    environment: dict[str, str], leave_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process groups are fake; everything else runs as on a real rank."""
    join = dist.init_process_group
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda *_, **__: join("fake", rank=0, world_size=1024, store=FakeStore()),
    )
    make = dist.new_group
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks=None, *_, **named: make(ranks, **named | {"backend": "fake"}),
    )
    layout = ParallelLayout.start(Degrees(8), patience=60.0)
    assert layout.fsdp.shape == (128, 8) and layout.ranks == 1024
    model = tiny()
    description = parallelize.shard(model, layout.fsdp, "bf16")
    assert "over 8 ranks, 128 replicas" in description
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    loss.token_loss_sum(model, MicroBatch(tokens, tokens)).backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_each_group_is_gathered_while_the_one_before_computes(
    environment: dict[str, str], leave_group: None, tied: bool
) -> None:
    model = tiny(tied)
    parallelize.shard(model, ParallelLayout.start().fsdp, "bf16")
    names = {
        module._get_fsdp_state(): name
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }
    first, *blocks = "model.embed_tokens", *(f"model.layers.{i}" for i in range(3))
    last = names[model.lm_head._get_fsdp_state()]

    def ahead(kind: str) -> dict[str, list[str]]:
        return {
            name: [names[s] for s in getattr(state, f"_states_to_{kind}_prefetch")]
            for state, name in names.items()
        }

    start = last if tied else first
    forward = dict(zip([start, *blocks], [[b] for b in blocks], strict=False))
    forward[blocks[-1]] = [] if tied else [last]
    backward = {last: [blocks[2]], blocks[2]: [blocks[1]], blocks[1]: [blocks[0]]}
    assert {k: v for k, v in ahead("forward").items() if v} == {
        k: v for k, v in forward.items() if v
    }
    assert {k: v for k, v in ahead("backward").items() if v} == backward


@pytest.mark.parametrize(
    ("listed", "bound"),
    [("2-3,6\n", {2, 3}), ("0-127\n", {0, 1, 2, 3}), ("8-9\n", None), ("\n", None), (None, None)],
)
def test_a_rank_is_bound_to_the_cores_near_its_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, listed: str | None, bound: set[int] | None
) -> None:
    gpu = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    taken: list[set[int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr("lib.parallel.layout._PCI", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: taken.append(cores))
    if listed is not None:
        (tmp_path / "0000:3b:00.0").mkdir()
        (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text(listed)
    _bind_to_near_cores(torch.device("cuda", 0))
    assert taken == ([bound] if bound else [])


def test_the_product_of_the_degrees_is_the_number_of_ranks() -> None:
    """Fewer ranks read different samples if several ranks share a sequence."""
    assert Degrees().replicas(6) == 1 and Degrees(2).replicas(6) == 3
    assert Degrees(4).dp_size(8) == 8 and Degrees(4).dp_rank(5) == 5
    shared = Degrees(context=2)
    assert shared.dp_size(8) == 4 and [shared.dp_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    for degrees, says in (
        (Degrees(4), "--shard-size 4 does not divide the 6 ranks"),
        (Degrees(8), "ranks = replicas × 8"),
        (Degrees(context=4), "--context-parallel 1, 2, 3, 6"),
    ):
        with pytest.raises(UsageError) as caught:
            degrees.replicas(6)
        assert says in caught.value.render()
