"""Items about float8, which needs a GPU of the Ada generation or newer, and a compiler."""

from __future__ import annotations

import signal
import statistics

from tests.gpu.place import Place
from tests.gpu.runs import index_losses, small_run_options
from tests.gpu.speed import MEASURED_STEPS, WARMUP_STEPS, run_measured, summarise_run

_LOSS_TOLERANCE = 0.01  # relative to the loss of bf16


def fp8(place: Place) -> None:
    """Compare tokens per second in bf16 and with both recipes of fp8."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    rates = {}
    for name, options in {
        "bf16": (),
        "fp8": ("--precision", "fp8"),
        "fp8 rowwise": ("--precision", "fp8", "--fp8-recipe", "rowwise"),
    }.items():
        run = run_measured(place, name, "8b-wide", 8192, 2, "--compile", "on", *options)
        rates[name] = summarise_run(run)["perf/tokens_per_sec_per_device"]
    place.note(
        in_one_line=", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()) + " tokens/s"
    )


def fp8_loss(place: Place) -> None:
    """After 200 steps the loss in fp8 is within 1 % of the loss in bf16."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    mean_losses = {}
    for precision in ("bf16", "fp8"):
        run = run_measured(
            place, precision, "1b", 2048, 4, "--compile", "on", "--precision", precision, steps=200
        )
        mean_losses[precision] = statistics.mean(
            row["train/loss_mean"] for row in run.rows[-(MEASURED_STEPS // WARMUP_STEPS) :]
        )
    place.note(mean_of_the_last_20=mean_losses)
    assert abs(mean_losses["fp8"] / mean_losses["bf16"] - 1) < _LOSS_TOLERANCE, mean_losses


def fp8_states(place: Place) -> None:
    """Runs in fp8 resume after SIGTERM, evaluate and train packed documents, as runs in bf16 do."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    fp8 = ("--precision", "fp8", "--compile", "on")
    for packing in ("concat", "documents"):
        options = small_run_options(
            place, "--max-steps", 24, "--packing", packing, "--eval-freq", 12
        )
        bf16_run = place.train(f"{packing}-bf16", *options, "--compile", "on", hook="skip_saves")
        uninterrupted = place.train(f"{packing}-whole", *options, *fp8, "--deterministic", "on")
        for figure in ("train/loss", "eval/loss"):
            expected = bf16_run.rows[-1][figure]
            value = uninterrupted.rows[-1][figure]
            place.note(**{f"{packing}, {figure}": {"bf16": expected, "fp8": value}})
            assert abs(value / expected - 1) < 2 * _LOSS_TOLERANCE, (
                packing,
                figure,
                value,
                expected,
            )
        stopped = place.begin(
            f"{packing}-stopped", *options, *fp8, "--deterministic", "on", hook="slow_steps"
        )
        stopped.wait_for(3)
        stopped.signal(signal.SIGTERM).wait_for_end(75)
        resumed = place.train(f"{packing}-stopped", *options, *fp8, "--deterministic", "on")
        place.note(**{f"{packing}, stopped after step": stopped.rows[-1]["step"]})
        assert index_losses(resumed) == index_losses(uninterrupted), (
            f"{packing}: the losses differ after a resume"
        )
