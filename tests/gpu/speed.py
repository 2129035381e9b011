"""Items that measure: MFU by model, length and compile, and what the options cost or bring."""

from __future__ import annotations

import json
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.gpu.kernels import median_s
from tests.gpu.place import ROOT, Place, Stage

STEPS, WARM = 20, 5  # of a measured run, and how many of them are left out
_SAVED_BYTES = 40e9  # of the disk, for the one checkpoint of the 8B-wide model
_WORDS = r"([\d.]+) TFLOP/s per rank .*?([\d.]+) GFLOP per token with the whole square of " \
         r"attention, ([\d.]+) with its causal half"


def measured(place: Place, name: str, model: str | Path, length: int, batch: int,
             *options: object, steps: int = STEPS, hook: str = "save_nothing", **how: Any) -> Stage:
    """Run stage 04 and note its speed. length: tokens per sample; batch: samples per pass."""
    length, batch, steps = place.size((length, batch, steps), (64, 2, 8))
    run = place.train(name, "-s", length, "-b", batch, "--max-steps", steps, "--lr", 1e-4,
                      "--log-freq", WARM, *options, model=model, hook=hook, **how)
    place.note(**{name: figures(run)})
    return run


def figures(run: Stage) -> dict[str, Any]:
    """Return the medians of a run's steps after the first ones, MFU by both counts of attention."""
    rows = [row for row in run.rows if row["step"] > WARM] or run.rows[-1:]
    middle = {key: statistics.median(row[key] for row in rows) for key in (
        "perf/tokens_per_sec_per_device", "time/data", "time/forward", "time/backward",
        "time/update", "time/optimizer", "time/total")}
    rate = middle["perf/tokens_per_sec_per_device"]
    peak, whole, causal = map(float, re.search(_WORDS, run.printed).groups())
    return middle | {"mfu_causal": rate * causal * 1e9 / (peak * 1e12),
                     "mfu_whole_square": rate * whole * 1e9 / (peak * 1e12),
                     "peak_gib": max(row["memory/peak_gib"] for row in run.rows),
                     "first_step_ms": run.rows[0]["time/total"],
                     "said": [line for line in run.printed.splitlines() if line.startswith(
                         ("attention", "loss", "compile", "packs", "warning"))]}


def mfu(model: str, length: int, batch: int, compiled: str):
    """Return an item that measures one setting."""
    def item(place: Place) -> None:
        measured(place, "run", model, length, batch, "--compile", compiled)
    item.__doc__ = f"{model}, {batch} × {length:,} tokens a pass, compile {compiled}."
    return item


def whole_run(place: Place) -> None:
    """The best setting found so far through the whole stage, as it is typed, with a save."""
    model = "8b-wide" if shutil.disk_usage(place.work).free > _SAVED_BYTES else "1b"
    best = {"length": 8192, "batch": 2, "compile": place.size("on", "off"), "mfu": 0.0}
    results = place.out / "mfu.jsonl"
    for line in results.read_text().splitlines() if results.exists() else ():
        result = json.loads(line)
        found = re.match(rf"{model}_(\d+)x(\d+)_compile_(\w+)", result["item"])
        reached = result["figures"].get("run", {}).get("mfu_causal", 0.0)
        if found and reached > best["mfu"]:
            best = {"length": int(found[2]), "batch": int(found[1]), "compile": found[3],
                    "mfu": reached}
    place.note(setting=best | {"model": model})
    began = time.monotonic()
    run = measured(place, "whole", model, best["length"], best["batch"], "--compile",
                   best["compile"], steps=40, hook="nothing", fresh=True)
    place.note(seconds_in_all=time.monotonic() - began,
               last_words=run.printed.strip().splitlines()[-12:])


def profile(place: Place) -> None:
    """A table of the dearest operations of two steps, kept beside the results."""
    for model in place.size(("8b-wide", "1b"), ("small",)):
        run = measured(place, model, model, 8192, 2, "--compile", place.size("on", "off"),
                       "--profile", "7:8", steps=9)
        table = next((run.experiment / "profile").glob("*.txt"))
        shutil.copyfile(table, place.out / f"profile-{model}.txt")


def save_stall(place: Place) -> None:
    """How long the steps wait for the first save in the background and for the second."""
    every = place.size(20, 3)
    run = measured(place, "saves", part_of_1b(place), 4096, 4, "--ckpt-freq", every, "--ckpt-keep",
                   2, "--compile", "off", "--log-freq", 1, steps=50, hook="nothing")
    lines = re.findall(r"(step \d+: sav.*)", run.printed)
    slowest = sorted(((row["time/total"], row["step"]) for row in run.rows), reverse=True)[:6]
    place.note(saves=lines, slowest_steps_ms=slowest)
    assert sum("the steps waited" in line for line in lines) >= 1, lines


def part_of_1b(place: Place) -> Path:
    """Return a model whose checkpoint takes 8 GB: three of them fit on a small disk."""
    return place.model("1b", num_hidden_layers=place.size(6, 4))


def first_step(place: Place) -> None:
    """The seconds from the launcher, torchrun and Python alone to the line of the first step."""
    launchers = {"python": {"fresh": True}, "torchrun": {"ranks": 1}, "single_node.sh": {
        "command": [ROOT / "launch/single_node.sh", "--nproc-per-node", 1, "--"],
        "env": {"PYTHON": sys.executable}}}
    if not place.on_gpu:
        del launchers["single_node.sh"]  # as the item `launcher` is rehearsed
    for name, how in launchers.items():
        for compiled in place.size(("off", "on"), ("off",)):
            began = time.monotonic()
            run = place.begin(f"{name}-{compiled}", "-s", place.size(4096, 64), "-b", 1,
                              "--max-steps", 2, "--compile", compiled, model=part_of_1b(place),
                              hook="nothing" if "command" in how else "save_nothing", **how)
            run.wait_for(1)
            place.note(**{f"{name}, compile {compiled}": time.monotonic() - began})
            run.ended()


def fp8(place: Place) -> None:
    """Tokens per second in bf16 and in both kinds of fp8."""
    place.need(place.on_gpu, "fp8 needs a GPU and compile")
    for name, options in {"bf16": (), "fp8": ("--precision", "fp8"),
                          "fp8 rowwise": ("--precision", "fp8", "--fp8-recipe", "rowwise")}.items():
        measured(place, name, "8b-wide", 8192, 2, "--compile", "on", *options)


def fp8_loss(place: Place) -> None:
    """The loss of 200 steps in fp8 is within 1 % of that in bf16."""
    place.need(place.on_gpu, "fp8 needs a GPU and compile")
    last = {}
    for precision in ("bf16", "fp8"):
        run = measured(place, precision, "1b", 2048, 4, "--compile", "on", "--precision", precision,
                       steps=200)
        last[precision] = statistics.mean(row["train/loss_mean"] for row in run.rows[-20 // WARM:])
    place.note(mean_of_the_last_20=last)
    assert abs(last["fp8"] / last["bf16"] - 1) < 0.01, last


def optimizers(place: Place) -> None:
    """The update and the memory of adamw8bit beside those of adamw."""
    for kind in ("adamw", "adamw8bit"):  # whose update is compiled where the blocks are
        measured(place, kind, "1b", 4096, 2, "--compile", place.size("on", "off"), "--optimizer",
                 kind)


def adapter_speed(place: Place) -> None:
    """Tokens per second with adapters, beside full training of the same model."""
    model, rates = place.with_weights("8b-wide"), {}
    for recompute in ("none", "full"):
        for name, options in {"full training": (), "adapters": ("--lora-rank", 16)}.items():
            run = measured(place, f"{name}, {recompute}", model, 4096, 2, "--compile",
                           place.size("on", "off"), "--activation-checkpointing", recompute,
                           *options, scratch=False)
            rates[name] = figures(run)["perf/tokens_per_sec_per_device"]
        place.note(**{f"adapters ÷ full training, {recompute}":
                      rates["adapters"] / rates["full training"]})
        assert not place.on_gpu or rates["adapters"] > rates["full training"], rates


def batch_auto(place: Place) -> None:
    """Which batch --batch-size auto takes, and the tokens per second with it and with one."""
    for batch in (1, "auto"):
        run = place.train(str(batch), "-s", place.size(4096, 64), "-b", batch, "--max-steps",
                          place.size(STEPS, 8), model="1b", hook="save_nothing")
        place.note(**{f"batch {batch}": figures(run), f"said with {batch}": [
            line for line in run.printed.splitlines() if "batch" in line][:6]})


def packed(place: Place) -> None:
    """Tokens per second with packed documents beside windows."""
    for packing in ("concat", "documents"):
        measured(place, packing, "1b", 8192, 2, "--packing", packing, "--compile",
                 place.size("on", "off"))


def attention(place: Place) -> None:
    """Forward and backward of attention by kernel: cuDNN, flash, and both by FA2 and FA3."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, restore_flash_attention_impl, sdpa_kernel

    from lib.parallel.attention_kernel import take_flash_3

    place.need(place.on_gpu, "a CPU has none of these kernels")
    from torch.nn.attention.varlen import varlen_attn

    heads, length = 32, 8192
    for width in (128, 64):
        parts = [torch.randn(1, heads, length, width, device="cuda", dtype=torch.bfloat16,
                             requires_grad=True) for _ in range(3)]
        flops = 3.5 * 2 * heads * width * length**2  # causal half, forward and backward
        ends = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        flat = [part[0].transpose(0, 1).contiguous().detach().requires_grad_() for part in parts]

        def sdpa(kernel: SDPBackend, parts: list = parts) -> None:
            with sdpa_kernel(kernel):
                F.scaled_dot_product_attention(*parts, is_causal=True).sum().backward()

        def varlen(flat: list = flat, ends: Any = ends, length: int = length) -> None:
            varlen_attn(*flat, ends, ends, length, length, window_size=(-1, 0)).sum().backward()

        works = {"sdpa cudnn": lambda sdpa=sdpa: sdpa(SDPBackend.CUDNN_ATTENTION),
                 "sdpa flash": lambda sdpa=sdpa: sdpa(SDPBackend.FLASH_ATTENTION),
                 "varlen FA2": varlen}
        tell(place, works, flops, width)
        if left_out := take_flash_3("varlen", parts):
            place.note(**{f"FA3, {width} wide": left_out})
            continue
        tell(place, {"sdpa FA3": works["sdpa flash"], "varlen FA3": varlen}, flops, width)
        restore_flash_attention_impl()


def tell(place: Place, works: dict[str, Callable[[], None]], flops: float, width: int) -> None:
    """Note what attention of heads of a width reaches by each kernel."""
    for name, work in works.items():
        try:
            reached = flops / median_s(place, work) / 1e12
        except Exception as error:  # a kernel that is not there is a figure too
            reached = str(error).splitlines()[0][:200]
        place.note(**{f"{name}, {width} wide, TFLOP/s": reached})


def eight_ranks(place: Place) -> None:
    """A rank of eight with a full 8B: its memory against the estimate, and the host's time.

    The other seven are not there: the collectives move nothing, so the values mean nothing.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from lib.models import architecture
    from lib.optim import registry
    from lib.optim.guard import StepGuard
    from lib.parallel import loss, parallelize
    from lib.planning import trace
    from lib.planning.memory import Estimates
    from lib.tokens.batches import MicroBatch

    directory = place.model("8b-wide", num_hidden_layers=place.size(32, 6))
    case = trace.Case(8, 8, *place.size((1, 8192, "bf16"), (1, 64, "fp32")), "full")
    estimated = Estimates(architecture.build_on_meta(directory, "sdpa")).step(case).total
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    device = torch.device(place.device)
    mesh = init_device_mesh(place.device, (8,), mesh_dim_names=("shard",))
    model = architecture.build_on_meta(directory, "sdpa")
    parallelize.parallelize(model, mesh, case.precision, case.recompute)
    parallelize.materialise(model, device, offload=False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.to_local(), std=0.02)
    head = model.get_output_embeddings()
    head.forward = loss.LossHead(head, loss.AT_ONCE[place.device])
    adamw = registry.build("adamw", model, 1e-5, (0.9, 0.95), 0.1)
    guard = StepGuard("fp32", 0.0, device)
    ids = torch.randint(0, model.config.vocab_size, (case.batch, case.seq_length), device=device)
    host, total = [], []
    for _ in range(place.size(8, 3)):
        began = time.perf_counter()
        loss.token_loss_sum(model, MicroBatch(ids, ids)).backward()
        guard.clip(adamw, 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)
        host.append(1000 * (time.perf_counter() - began))
        if place.on_gpu:
            torch.cuda.synchronize()
        total.append(1000 * (time.perf_counter() - began))
    place.note(estimated_gib=estimated / 2**30, host_ms=host, step_ms=total)
    if place.on_gpu:
        peak = torch.cuda.max_memory_allocated() / 2**30
        place.note(peak_gib=peak)
        assert abs(estimated / 2**30 / peak - 1) < 0.1, "the estimate is off by over 10 %"
