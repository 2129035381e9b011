# covers: lib/planning/memory.py, lib/planning/trace.py, lib/planning/tracker.py
# covers: lib/planning/sizes.py, lib/train/plan.py
"""Memory estimates agree with arithmetic, with each other and with real steps."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from lib.core import log
from lib.models.lora import Lora
from lib.models.sharded import Placement, local_tensor
from lib.optim.optimizers import Choice
from lib.parallel import loss, parallelize
from lib.planning import memory, sizes, trace
from lib.planning.memory import Estimates
from lib.planning.options import PlannedGpus
from lib.planning.trace import StepConfig
from lib.planning.tracker import OFFLOADED, Tracker
from lib.train import plan
from lib.train.config import Config
from tests.conftest import run_stage
from tests.training import save_tokenizer

SMALL = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
ASKED = Config(batch_size=2, seq_length=64, precision="fp32")


def on_meta(config: PretrainedConfig | None = None, lora: Lora | None = None) -> PreTrainedModel:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config or LlamaConfig(**SMALL), dtype=torch.float32
        ).train()
    if lora:
        lora.convert(model, Placement())
    return model


def case(**changes: Any) -> StepConfig:
    ranks = changes.get("ranks", 8)
    return StepConfig(
        **{
            "ranks": ranks,
            "shard_size": ranks,
            "batch": 2,
            "seq_length": 256,
            "precision": "bf16",
            "recompute": "none",
            **changes,
        }
    )


def traced(model: PreTrainedModel, step_config: StepConfig) -> trace.StepMemory:
    with trace.fake_mesh(step_config.ranks, step_config.shard_size) as mesh:
        return trace.trace_step(model, step_config, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LlamaConfig(**SMALL), id="llama", marks=pytest.mark.long),
        pytest.param(LlamaConfig(**SMALL, tie_word_embeddings=True), id="tied"),
        pytest.param(
            MixtralConfig(**SMALL, num_local_experts=4), id="mixtral", marks=pytest.mark.long
        ),
    ],
)
def test_a_few_blocks_are_traced_for_all(config: PretrainedConfig, recompute: str) -> None:
    model = on_meta(config)
    step_config = case(recompute=recompute)
    assert Estimates(model).step(step_config) == traced(model, step_config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "lora",
    [
        pytest.param(None, id="full"),
        pytest.param(Lora(4, 8.0, precision="bf16"), id="lora"),
    ],
)
def test_memory_with_more_ranks_needs_no_second_trace(lora: Lora | None) -> None:
    model = on_meta(lora=lora)
    estimates = Estimates(model)
    estimates.step(case(ranks=8))
    guessed = estimates.step(case(ranks=32))
    exact = traced(model, case(ranks=32))
    assert len(estimates._traced) == 1
    assert guessed.total == pytest.approx(exact.total, rel=0.01)
    assert guessed.largest["gradients"] == pytest.approx(exact.largest["gradients"], rel=0.01)


@pytest.mark.slow
def test_uneven_shards_count_as_the_largest() -> None:
    model = on_meta(LlamaConfig(**{**SMALL, "vocab_size": 1001, "intermediate_size": 161}))
    rows = [(math.ceil(p.shape[0] / 8), *p.shape[1:]) for p in model.parameters()]
    expected = 4 * sum(torch.Size(shape).numel() for shape in rows)
    held = Estimates(model).step(case()).largest
    assert held["gradients"] == expected
    assert held["optimizer"] == 2 * expected + 4 * len(rows)  # each has a count of steps
    small = Estimates(model).step(case(optimizer=Choice("adamw8bit"))).largest["optimizer"]
    assert small < 0.3 * held["optimizer"]  # rows of 64 and 161 numbers have a scale each
    assert held["parameters"] == expected + 2 * 2 * 256 * 8 + 2 * 8 * 4  # tokens, rotary table


def test_an_estimate_does_not_log_the_parameters_of_an_optimizer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log.setup()
    Estimates(on_meta()).step(case(optimizer=Choice("muon")))
    assert "Muon" not in capsys.readouterr().out


@pytest.mark.slow
def test_each_option_changes_memory_in_the_expected_direction() -> None:
    estimates = Estimates(on_meta())
    total = {
        name: estimates.step(case(**changes)).total
        for name, changes in {
            "plain": {},
            "selective": {"recompute": "selective"},
            "full": {"recompute": "full"},
            "batch": {"batch": 4},
            "accumulating": {"accumulates": True},
            "fp32": {"precision": "fp32"},
            "replicas": {"ranks": 64, "shard_size": 8},
            "offload": {"offload": True},
            "masked": {"masked": True},
            "gathered": {"keep_gathered": True},
        }.items()
    }
    assert total["full"] < total["selective"] < total["plain"] < 0.6 * total["batch"]
    assert (
        total["offload"]
        < total["plain"]
        < min(total["fp32"], total["accumulating"], total["gathered"])
    )
    assert total["masked"] > total["plain"] + 2 * 256 * 256
    assert total["plain"] <= total["replicas"] < 1.2 * total["plain"]
    assert not set(estimates.step(case(offload=True)).peak) & {"parameters", "optimizer"}


def test_activations_in_host_memory_leave_as_much_on_a_gpu_for_any_number_of_blocks() -> None:
    steps = {}
    for blocks in (4, 8):
        model = on_meta(LlamaConfig(**{**SMALL, "num_hidden_layers": blocks}))
        step_config = case(recompute="full", activation_offload=True)
        step = steps[blocks] = Estimates(model).step(step_config)
        assert step == traced(model, step_config)
        offloaded = (blocks - 1) * step_config.tokens * SMALL["hidden_size"] * 2
        assert step.largest[OFFLOADED] == offloaded
        assert sizes.count_offloaded(model, step_config.tokens, "bf16") == offloaded
    assert steps[4].largest["activations"] == steps[8].largest["activations"]
    assert OFFLOADED not in steps[8].peak


def test_boundaries_of_packed_documents_take_memory_in_backward() -> None:
    """The gradient of the queries has 128 more rows of float32 per document, in all heads."""
    model = on_meta(LlamaConfig(**{**SMALL, "num_hidden_layers": 1}))
    few, many = (traced(model, case(ranks=1, documents=count)) for count in (65, 665))
    more = 2 * 600 * (128 * 64 * 4) + 2 * 600 * 4  # and the boundaries themselves
    assert many.largest["workspace"] - few.largest["workspace"] == pytest.approx(more, rel=0.01)
    assert more / 2 < many.total - few.total <= more  # the loss is no longer the most


@pytest.mark.parametrize(
    ("options", "precision", "on_gpu", "expected"),
    [
        ({}, "bf16", True, (False, 65)),
        ({"attention": "varlen"}, "bf16", True, (False, 65)),
        ({"attention": "sdpa"}, "bf16", True, (True, 0)),
        ({}, "fp32", True, (True, 0)),
        ({"attention": "flex"}, "bf16", True, (False, 0)),
        ({}, "bf16", False, (True, 0)),
        ({"packing": "concat"}, "bf16", True, (False, 0)),
    ],
    ids=str,
)
def test_the_estimate_uses_the_attention_of_the_run(
    options: dict[str, Any], precision: str, on_gpu: bool, expected: tuple[bool, int]
) -> None:
    config = replace(ASKED, **{"packing": "documents", "precision": precision, **options})
    planned = plan.make_step_config(config, on_meta(), 1, on_gpu, 65)
    assert (planned.masked, planned.documents) == expected


def test_documents_are_estimated_before_they_are_packed() -> None:
    """The estimate uses the most documents that a pack may contain, and its padding."""
    config = replace(ASKED, packing="documents", precision="bf16", seq_length=8192)
    assert plan.make_step_config(config, on_meta(), 1, True).documents == 8192 // 32 + 1


def test_a_mask_is_estimated_if_no_kernel_takes_packed_documents() -> None:
    config = replace(ASKED, packing="documents", precision="bf16", plan_gpus=PlannedGpus([8]))
    for other in ({"head_dim": 264}, {"attention_dropout": 0.1}):
        model = on_meta(LlamaConfig(**SMALL, **other))
        planned = plan.make_step_config(config, model, 8, True)
        assert planned.masked and not planned.documents


def test_models_that_change_their_logits_are_recognised() -> None:
    assert trace.returns_head_result(on_meta())
    assert not trace.returns_head_result(on_meta(Gemma2Config(**SMALL, head_dim=16)))


@pytest.mark.slow
def test_blocks_that_differ_are_all_traced() -> None:
    model = on_meta(Gemma2Config(**SMALL, head_dim=16))
    assert trace.shorten_model(model, 4) is None
    step = Estimates(model).step(case())
    assert step.largest["loss"] >= 2 * 256 * 1024 * (2 + 4)  # logits, and once more in float32


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_lora_adds_a_gigabyte_to_base_model_and_activations(recompute: str) -> None:
    """This is Llama 3.1 8B on one GPU, and recomputation of the adapters costs nothing more."""
    shape = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=1 << 17,
    )
    model = on_meta(shape, Lora(16, 32.0, precision="bf16"))
    base = 2 * sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert base == 2 * 8_030_261_248 and model.num_parameters(only_trainable=True) == 41_943_040
    step = Estimates(model).step(case(ranks=1, batch=1, seq_length=4096, recompute=recompute))
    states = sum(step.largest[kind] for kind in ("parameters", "gradients", "optimizer"))
    beside = states + step.largest["gathered"] - base
    assert 16 * 41_943_040 < beside < 1e9
    assert step.total < base + 1e9 + step.largest["activations"] + step.largest["loss"]


@pytest.mark.slow
def test_frozen_weights_that_are_not_sharded_are_not_gathered() -> None:
    model = on_meta(
        LlamaConfig(**{**SMALL, "num_hidden_layers": 2}), Lora(4, 8.0, precision="bf16")
    )
    adapters = 2 * model.num_parameters(only_trainable=True)
    frozen = 2 * (model.num_parameters() - model.num_parameters(only_trainable=True))
    for ranks, shard_size, offload in ((4, 1, False), (4, 1, True), (4, 2, False)):
        step = traced(model, case(ranks=ranks, shard_size=shard_size, offload=offload))
        is_whole = shard_size == 1 and not offload
        assert (step.largest["gathered"] <= 3 * adapters) == is_whole
        assert step.largest["parameters"] > frozen / shard_size


def test_selective_checkpointing_keeps_no_output_of_an_adapter() -> None:
    """Otherwise it would keep the output of a linear layer with and without its adapter."""
    model = on_meta(
        LlamaConfig(**{**SMALL, "num_hidden_layers": 2}), Lora(4, 8.0, precision="bf16")
    )
    activations = {
        kind: traced(model, case(ranks=1, recompute=kind)).largest["activations"]
        for kind in ("none", "selective")
    }
    assert activations["selective"] < 0.75 * activations["none"]


def test_layers_before_the_first_adapter_have_no_backward_pass() -> None:
    model = on_meta(lora=Lora(4, 8.0, targets=r".*layers\.[56]\..*", precision="bf16"))
    step = traced(model, case(ranks=1))
    trained = traced(on_meta(), case(ranks=1))
    assert step.largest["activations"] < 0.6 * trained.largest["activations"]
    assert step.largest["gradients"] == 4 * model.num_parameters(only_trainable=True)


def test_a_trace_leaves_model_and_process_unchanged() -> None:
    model = on_meta()
    resize = torch.UntypedStorage.resize_
    Estimates(model).step(case())
    assert not dist.is_initialized() and torch.UntypedStorage.resize_ is resize
    assert all(
        p.device.type == "meta" and type(p) is torch.nn.Parameter for p in model.parameters()
    )
    assert "forward" not in model.get_output_embeddings().__dict__


@contextmanager
def mesh_of_one_rank() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("changes", "rank"),
    [
        ({"recompute": "selective"}, 0),
        *(
            pytest.param(changes, rank, marks=pytest.mark.slow)
            for changes, rank in (
                ({"accumulates": True}, 8),
                ({"precision": "fp32", "accumulates": True}, 0),
                ({"recompute": "full", "keep_gathered": True, "optimizer": Choice("adamw8bit")}, 0),
                ({"precision": "fp32", "recompute": "selective"}, 4),
                ({"recompute": "full", "activation_offload": True}, 0),
            )
        ),
    ],
    ids=str,
)
def test_fake_tensors_take_as_much_memory_as_real_ones(changes: dict[str, Any], rank: int) -> None:
    step_config = case(ranks=1, seq_length=128, **changes)
    lora = Lora(rank, 2.0 * rank, precision=step_config.precision) if rank else None
    estimated = Estimates(on_meta(lora=lora)).step(step_config)
    model = on_meta(lora=lora)
    tracker = Tracker()
    with mesh_of_one_rank() as mesh:
        parallelize.parallelize(
            model,
            mesh,
            step_config.precision,
            step_config.recompute,
            keep_gathered=step_config.keep_gathered,
            activation_offload=trace._TracedOffload(tracker)
            if step_config.activation_offload
            else None,
        )
        with tracker:
            parallelize.materialise_model(model, torch.device("cpu"), offload=False)
            for parameter in model.parameters():
                local_tensor(parameter).zero_()
            head = model.get_output_embeddings()
            head.forward = loss.LossHead(head, loss.CHUNK_LOGITS["cuda"])
            real = trace.record_step(model, step_config, tracker)
    assert estimated.total == pytest.approx(real.total, rel=0.02)
    for kind, size in real.largest.items():
        assert estimated.largest[kind] == pytest.approx(size, rel=0.05), kind


def test_a_failed_estimate_is_one_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such operator\nmore")

    lines: list[str] = []
    monkeypatch.setattr(memory, "Estimates", broken)
    monkeypatch.setattr(memory.log, "detail", lines.append)
    model = on_meta()
    small = memory.MemoryEstimate(model, "fp32")
    small.begin(plan.make_step_config(ASKED, model, 1, False))
    assert "estimated" not in small.describe_peak(1.0, 0.5)
    small.close()
    monkeypatch.setattr(memory, "ESTIMATED_FROM", 1)
    estimate = memory.MemoryEstimate(model, "fp32")
    estimate.begin(plan.make_step_config(ASKED, model, 1, False))
    assert "it was not estimated" in estimate.describe_peak(1.0, 0.5)  # which waits for the answer
    [line] = lines
    assert line.endswith("RuntimeError: no such operator")
    estimate.close()


@pytest.mark.slow
def test_on_a_gpu_a_child_process_without_gpus_makes_the_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A fork of a process that uses CUDA cannot compute, so a new interpreter does."""
    monkeypatch.setattr(memory, "ESTIMATED_FROM", 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    peaks = []
    model = on_meta(lora=Lora(4, 8.0, 0.1))
    for in_use in (False, True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda in_use=in_use: in_use)
        estimate = memory.MemoryEstimate(model, "fp32")
        estimate.begin(plan.make_step_config(ASKED, model, 1, False))
        environ = Path(f"/proc/{estimate._process.pid}/environ")
        while not (sees := environ.read_bytes().split(b"\0"))[0]:  # it has not begun yet
            time.sleep(0.001)
        assert not in_use or b"CUDA_VISIBLE_DEVICES=" in sees
        estimate.report(300.0)
        peaks.append(estimate.gib)
        estimate.close()
    assert peaks[0] and peaks[0] == peaks[1]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.slow
def test_a_dry_run_prints_the_memory_estimate(project: Path) -> None:
    before = sorted(project.rglob("*"))
    command = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "-s", 64)
    done = run_stage(
        *command,
        "--global-batch-size",
        64,
        "--dry-run",
        "--plan-gpus",
        "8,64:40",
        cwd=project,
        env={"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
    )
    assert "float32 masters, bf16 compute" in done.stdout  # of those GPUs, not of this processor
    assert "64 tokens per sample, bf16" in done.stdout and "fp32" not in done.stdout
    for ranks, passes, replicas in ((8, 8, ""), (64, 1, " in 8 replicas")):  # one per node
        assert re.search(
            rf"on {ranks} GPUs:\n  tokens/step +4,096 = 1 per process × 64 tokens × "
            rf"{passes} accumulation × {ranks} ranks\n",
            done.stdout,
        )
        assert re.search(rf"  {ranks} GPUs{replicas}: .* KiB parameters.*; in MiB:", done.stdout)
    assert " 0.00 " not in done.stdout
    match = re.search(
        r"not prepared yet .* ([\d.]+)K tokens are an estimate from a sample", done.stdout
    )
    assert done.stdout.count("  steps  ") == 2
    assert len(re.findall(r"(none|selective|full) .* fits$", done.stdout, re.MULTILINE)) == 18
    assert sorted(project.rglob("*")) == before
    run_stage(*command, "--prepare-only", cwd=project)
    tokens = sum(
        json.loads(path.read_text())["summary"]["splits"]["train"]["tokens"]
        for path in project.glob(".cache/tokens/*/manifest.json")
    )
    assert float(match[1]) * 1000 == pytest.approx(tokens, rel=0.1)


@pytest.mark.parametrize(
    ("options", "usable_gib", "expected"),
    [
        ({}, 9.5, "--activation-checkpointing selective: 9"),
        ({}, 5.5, "--activation-checkpointing full: 5"),
        ({"batch_size": 8}, 6.5, "-b 4 --activation-checkpointing full: 6"),
        ({"activation_checkpointing": "full"}, 4.5, "-b 1 --activation-checkpointing full: 4.5"),
        ({}, 4.3, "-b 1 --activation-checkpointing full --activation-offload on: 4.25"),
        ({}, 4, "-b 1 --activation-checkpointing full on 16 GPUs: 2.5"),
        ({}, 4.2, "-b 1 --activation-checkpointing full --context-parallel 4: 4.12"),
        ({"context_parallel": 2}, 4.1, "-b 1 --activation-checkpointing full --context-parallel 8"),
        ({}, 0.55, "--activation-offload on --context-parallel 8 on 64 GPUs: 0.531"),
        ({}, 0.09, "full --context-parallel 8 --cpu-offload on: 0.0625"),
        ({}, 0.05, "--activation-offload on --context-parallel 8 --cpu-offload on: 0.0312"),
        ({}, 0.02, "full --context-parallel 8 --cpu-offload on -s 256: 0.0156"),
        ({}, 0.001, "no option makes it fit"),
    ],
    ids=str,
)
def test_the_least_costly_setting_that_fits_is_printed(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], usable_gib: float, expected: str
) -> None:
    class Known:
        """Four GiB of states on 8 GPUs, and 3, 2.5 or 0.5 GiB of activations per sample.

        With --activation-offload there are 0.25 GiB.
        """

        def __init__(self, *_: object) -> None: ...

        def step(self, case: StepConfig) -> trace.StepMemory:
            unit = {"none": 3, "selective": 2.5, "full": 0.5}[case.recompute]
            unit /= 2 if case.activation_offload else 1
            held = dict.fromkeys(trace.KINDS, 0) | {
                "gradients": (8 << 30) // case.ranks,
                "optimizer": (24 << 30) // case.ranks,
                "activations": int(unit * case.tokens / 1024 * (1 << 30)),
            }
            return trace.StepMemory(held, (held,), case.offload)

    lines: list[str] = []
    monkeypatch.setattr(memory, "Estimates", Known)
    monkeypatch.setattr(memory.log, "info", lines.append)
    config = replace(ASKED, seq_length=1024, compile=False, **options)
    gib = usable_gib / 0.9
    memory.print_memory_table(
        on_meta(), [plan.make_step_config(config, on_meta(), 8, True)], gib, shown=False
    )
    arrows = [line for line in lines if line.startswith("    →")]
    assert expected in arrows[-2] and "longest sequence" in arrows[-1], lines


def test_contradictory_options_of_a_plan_are_refused(project: Path) -> None:
    command = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "--plan-gpus")
    for arguments, message in (
        ((8,), "--plan-gpus only plans"),
        (("8,12", "--shard-size", 8, "--dry-run"), "divide the 12 ranks"),
        (("8;64", "--dry-run"), "a whole number above 0"),
    ):
        done = run_stage(*command, *arguments, cwd=project, expect=2)
        assert message in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_plan_for_more_gpus_than_the_data_fills_is_printed(project: Path) -> None:
    command = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "--dry-run", "-b", 16)
    plan = (*command, "-s", 64, "--plan-gpus", "1,64,128")
    done = run_stage(*plan, cwd=project, before="tests.training:plan_one_batch")
    warned = re.findall(
        r"warning: on (\d+) GPUs? the dataset is too small for one step", done.stdout
    )
    assert warned == ["64", "128"] and done.stdout.count("tokens/step") == 3
    assert re.search(r"steps +1 \(", done.stdout) and "  128 GPUs" in done.stdout
    done = run_stage(*command, "-s", 64, cwd=project, ranks=0, env={"WORLD_SIZE": "64"}, expect=2)
    assert "too small for one step" in done.stderr


@pytest.mark.slow
def test_a_recipe_that_moves_activations_to_the_host_is_planned_on_a_cpu(project: Path) -> None:
    command = ("04_train_fsdp.py", "-e", "x", "-d", "corpus", "-m", "model", "--dry-run", "-b", 1)
    options = (*command, "-s", 64, "--activation-offload", "on")
    done = run_stage(*options, cwd=project)
    assert "--activation-offload changes nothing here" in done.stdout
    assert "--activation-checkpointing full (--activation-offload)" in done.stdout
    done = run_stage(*options, "--plan-gpus", 8, cwd=project)
    assert re.search(r"on 8 GPUs, --activation-offload on: .* per node", done.stdout)
    assert re.search("→ +1  full", done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.long)])
def test_a_run_takes_the_estimated_memory(project: Path, ranks: int) -> None:
    model = project / "larger"
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=16_000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    ).save_pretrained(model)
    save_tokenizer(model, project / "raw_text")
    # malloc keeps smaller blocks that were freed; so they are given back, as by a GPU's allocator.
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "corpus",
        "-m",
        "larger",
        "-s",
        1024,
        "-b",
        2,
        "--max-steps",
        3,
        "--eval-batches",
        1,
        "--log-freq",
        1,
        "--from-scratch",
        ranks=ranks,
        cwd=project,
        env={"MALLOC_MMAP_THRESHOLD_": "1000000"},
        fresh=True,
        before="tests.training:wait_for_estimates",
    )
    match = re.search(r"([\d.]+) GiB without .*; ([\d.]+) GiB were estimated", done.stdout)
    assert match, done.stdout
    measured, estimated = map(float, match.groups())
    assert estimated == pytest.approx(measured, rel=0.15)
