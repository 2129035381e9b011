"""Items about 8-bit floats, which need a GPU of the Ada generation or newer, and a compiler."""

from __future__ import annotations

import signal
import statistics

from tests.gpu.place import Place
from tests.gpu.runs import losses_by_step, shape
from tests.gpu.speed import STEPS, WARM, figures, measured

_NEAR = 0.01  # of the loss of bf16


def fp8(place: Place) -> None:
    """Tokens per second in bf16 and in both kinds of fp8."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    rates = {}
    for name, options in {
        "bf16": (),
        "fp8": ("--precision", "fp8"),
        "fp8 rowwise": ("--precision", "fp8", "--fp8-recipe", "rowwise"),
    }.items():
        run = measured(place, name, "8b-wide", 8192, 2, "--compile", "on", *options)
        rates[name] = figures(run)["perf/tokens_per_sec_per_device"]
    place.note(
        in_one_line=", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items()) + " tokens/s"
    )


def fp8_loss(place: Place) -> None:
    """The loss of 200 steps in fp8 is within 1 % of that in bf16."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    last = {}
    for precision in ("bf16", "fp8"):
        run = measured(
            place, precision, "1b", 2048, 4, "--compile", "on", "--precision", precision, steps=200
        )
        last[precision] = statistics.mean(
            row["train/loss_mean"] for row in run.rows[-(STEPS // WARM) :]
        )
    place.note(mean_of_the_last_20=last)
    assert abs(last["fp8"] / last["bf16"] - 1) < _NEAR, last


def fp8_states(place: Place) -> None:
    """fp8 goes on after SIGTERM, evaluates, and trains packed documents, as bf16 does."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    fp8 = ("--precision", "fp8", "--compile", "on")
    for packing in ("concat", "documents"):
        options = shape(place, "--max-steps", 24, "--packing", packing, "--eval-freq", 12)
        plain = place.train(f"{packing}-bf16", *options, "--compile", "on", hook="save_nothing")
        whole = place.train(f"{packing}-whole", *options, *fp8, "--deterministic", "on")
        for figure in ("train/loss", "eval/loss"):
            expected = plain.rows[-1][figure]
            found = whole.rows[-1][figure]
            place.note(**{f"{packing}, {figure}": {"bf16": expected, "fp8": found}})
            assert abs(found / expected - 1) < 2 * _NEAR, (packing, figure, found, expected)
        stopped = place.begin(
            f"{packing}-stopped", *options, *fp8, "--deterministic", "on", hook="slow_steps"
        )
        stopped.wait_for(3)
        stopped.signal(signal.SIGTERM).ended(75)
        again = place.train(f"{packing}-stopped", *options, *fp8, "--deterministic", "on")
        place.note(**{f"{packing}, stopped after step": stopped.rows[-1]["step"]})
        assert losses_by_step(again) == losses_by_step(whole), (
            f"{packing}: the losses differ after a resume"
        )
