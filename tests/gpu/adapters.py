"""Items about LoRA adapters: what they learn, keep and cost."""

from __future__ import annotations

import signal

from tests.gpu.memory import compare_memory, is_near
from tests.gpu.place import Place
from tests.gpu.runs import digests, losses_by_step, shape
from tests.gpu.speed import AIMS, figures, in_words, measured


def adapters(place: Place) -> None:
    """LoRA of an 8B learns the same recomputed or not, in the estimated memory; notes its MFU."""
    model = place.with_weights(
        "8b-wide",
        **place.size({"num_hidden_layers": 32}, {"vocab_size": 80_000, "num_hidden_layers": 2}),
    )
    fast = measured(
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
    place.note(aim_mfu_causal=AIMS["lora-8b"], in_one_line=in_words(figures(fast), AIMS["lora-8b"]))
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
            hook="save_nothing",
        )
        ratios[kind] = compare_memory(place, run, f"memory, {kind}")
        losses[kind] = run.losses
        assert "frozen weights in" in run.printed and run.losses[-1] < run.losses[0]
    differ = max(abs(a / b - 1) for a, b in zip(*losses.values(), strict=True))
    place.note(losses=losses, losses_differ_by=differ, estimate_by_measured=ratios)
    assert differ < 1e-2, losses
    assert all(is_near(place, ratio, compiled=False) for ratio in ratios.values()), ratios


def adapters_resume(place: Place) -> None:
    """Compiled adapters with packed documents go on bit for bit after SIGTERM."""
    model = place.with_weights("small")
    options = shape(
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
    whole = place.train("whole", *options, model=model, scratch=False)
    stopped = place.begin("stopped", *options, model=model, scratch=False, hook="slow_steps")
    stopped.wait_for(3)
    stopped.signal(signal.SIGTERM).ended(75)
    at = stopped.rows[-1]["step"]
    again = place.train("stopped", *options, model=model, scratch=False)
    place.note(
        **{"stopped after step": at, "first loss": whole.losses[0], "last loss": whole.losses[-1]}
    )
    assert at < whole.rows[-1]["step"], "the run ended before it was stopped"
    assert whole.losses[-1] < whole.losses[0], "the adapters do not learn"
    assert losses_by_step(again) == losses_by_step(whole), "the losses differ after a resume"
    assert digests(again) == digests(whole), "adapters or moments differ after a resume"


def adapter_speed(place: Place) -> None:
    """Tokens per second with adapters, beside full training of the same model.

    Full training without its update is the speed of the base model alone.
    """
    model = place.with_weights("8b-wide")
    settings = {
        "full training": ("none", ()),
        "adapters": ("none", ("--lora-rank", 16)),
        "adapters, recomputed": ("full", ("--lora-rank", 16)),
    }
    rates = {}
    for name, (recompute, options) in settings.items():
        run = measured(
            place,
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
        reached = figures(run)
        rates[name] = reached
        if name == "full training":
            without_update = 1 - reached["time/update"] / reached["time/total"]
            base = reached["perf/tokens_per_sec_per_device"] / without_update
    trained, added = (
        rates[name]["perf/tokens_per_sec_per_device"] for name in ("full training", "adapters")
    )
    place.note(**{"adapters ÷ full training": added / trained, "adapters ÷ base": added / base})
    assert not place.on_gpu or added > trained, rates
