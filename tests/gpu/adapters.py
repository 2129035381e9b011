"""Items about LoRA adapters: losses, memory, resume and speed."""

from __future__ import annotations

import signal

from tests.gpu.memory import is_estimate_near, note_memory_ratio
from tests.gpu.place import Place
from tests.gpu.runs import index_losses, read_digests, small_run_options
from tests.gpu.speed import (
    MFU_TARGETS,
    describe_figures,
    measure_or_reuse,
    run_measured,
    summarise_run,
)


def adapters(place: Place) -> None:
    """LoRA on an 8B gives the same losses recomputed or not, in the estimated memory."""
    model = place.with_weights(
        "8b-wide",
        **place.size({"num_hidden_layers": 32}, {"vocab_size": 80_000, "num_hidden_layers": 2}),
    )
    fast = run_measured(
        place,
        "lora-8b",
        model,
        8192,
        2,
        "--lora-rank",
        16,
        "--compile",
        place.size("on", "off"),
        steps=15,
        scratch=False,
    )
    place.note(
        aim_mfu_causal=MFU_TARGETS["lora-8b"],
        in_one_line=describe_figures(summarise_run(fast), MFU_TARGETS["lora-8b"]),
    )
    losses = {}
    ratios = {}
    for kind in ("none", "full"):
        run = place.train(
            kind,
            "-s",
            place.size(2048, 128),
            "-b",
            place.size(1, 4),
            "--max-steps",
            6,
            "--lora-rank",
            16,
            "--activation-checkpointing",
            kind,
            "--compile",
            "off",
            "--warmup-steps",
            1,
            model=model,
            scratch=False,
            hook="skip_saves",
        )
        ratios[kind] = note_memory_ratio(place, run, f"memory, {kind}")
        losses[kind] = run.losses
        assert any("frozen weights in" in line for line in run.log_lines)
        assert run.losses[-1] < run.losses[0]
    difference = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
    place.note(losses=losses, losses_differ_by=difference, estimate_by_measured=ratios)
    assert difference < 1e-2, losses
    assert all(is_estimate_near(place, ratio, compiled=False) for ratio in ratios.values()), ratios


def adapters_resume(place: Place) -> None:
    """Compiled adapters with packed documents resume after SIGTERM to the same bits."""
    model = place.with_weights("small")
    options = small_run_options(
        place,
        "--lora-rank",
        8,
        "--packing",
        "documents",
        "--max-steps",
        place.size(20, 8),
        "--deterministic",
        "on",
        "--compile",
        place.size("on", "off"),
    )
    uninterrupted = place.train("whole", *options, model=model, scratch=False)
    stopped = place.begin("stopped", *options, model=model, scratch=False, hook="slow_steps")
    stopped.wait_for(3)
    stopped.signal(signal.SIGTERM).wait_for_end(75)
    last_step = stopped.rows[-1]["step"]
    resumed = place.train("stopped", *options, model=model, scratch=False)
    place.note(
        **{
            "stopped after step": last_step,
            "first loss": uninterrupted.losses[0],
            "last loss": uninterrupted.losses[-1],
        }
    )
    assert last_step < uninterrupted.rows[-1]["step"], "the run ended before it was stopped"
    assert uninterrupted.losses[-1] < uninterrupted.losses[0], "the adapters do not learn"
    assert index_losses(resumed) == index_losses(uninterrupted), "the losses differ after a resume"
    assert read_digests(resumed) == read_digests(uninterrupted), (
        "adapters or moments differ after a resume"
    )


def adapter_speed(place: Place) -> None:
    """Compare tokens per second with adapters to those of full training of the same model.

    The base model's own rate is taken from full training, less the time of its update.
    """
    model = place.with_weights("8b-wide")
    settings = {
        "full training": ("none", ()),
        "adapters": ("none", ("--lora-rank", 16)),
        "adapters, recomputed": ("full", ("--lora-rank", 16)),
    }
    figures_of = {}
    for name, (recompute, options) in settings.items():
        figures = measure_or_reuse(
            place,
            None if options else ("8b-wide_2x8192_compile_on", "run"),
            name,
            model,
            8192,
            2,
            "--compile",
            place.size("on", "off"),
            "--activation-checkpointing",
            recompute,
            *options,
            scratch=False,
        )
        figures_of[name] = figures
        if name == "full training":
            share_without_update = 1 - figures["time/update"] / figures["time/total"]
            base_rate = figures["perf/tokens_per_sec_per_device"] / share_without_update
    full_rate, adapter_rate = (
        figures_of[name]["perf/tokens_per_sec_per_device"] for name in ("full training", "adapters")
    )
    place.note(
        **{
            "adapters ÷ full training": adapter_rate / full_rate,
            "adapters ÷ base": adapter_rate / base_rate,
        }
    )
    assert not place.on_gpu or adapter_rate > full_rate, figures_of
