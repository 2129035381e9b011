"""Items about float8, which needs a GPU of the Ada generation or newer, and a compiler."""

from __future__ import annotations

import signal
import statistics

from tests.gpu import traces
from tests.gpu.place import Place
from tests.gpu.runs import index_losses, small_run_options
from tests.gpu.speed import (
    MEASURED_STEPS,
    WARMUP_STEPS,
    append_profile,
    run_measured,
    summarise_run,
)

_LOSS_TOLERANCE = 0.01  # relative to the loss of bf16


def fp8(place: Place) -> None:
    """Compare bf16 with both recipes of fp8: tokens per second, and where a step's time goes."""
    place.need(place.on_gpu, "fp8 needs a GPU and compiled blocks")
    rates = {}
    parts = {}
    for name, options in {
        "bf16": (),
        "fp8": ("--precision", "fp8"),
        "fp8 rowwise": ("--precision", "fp8-rowwise"),
    }.items():
        profiled = ("--profile", "18:18")
        run = run_measured(place, name, "8b-wide", 8192, 2, "--compile", "on", *options, *profiled)
        rates[name] = summarise_run(run)["perf/tokens_per_sec_per_device"]
        parts[name] = traces.sum_by_part(traces.load_trace(run))
        append_profile(place, name, run)
        gain = explain_gain(parts["bf16"], parts[name])
        place.note(**{f"{name}, ms by part": parts[name], f"{name}, gain": gain})
    place.note(
        in_one_line=", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
        + f" tokens/s; fp8 loses most to {gain_limit(parts['bf16'], parts['fp8'])}"
    )


def explain_gain(bf16: dict[str, float], fp8: dict[str, float]) -> dict[str, float]:
    """Return the gain of fp8 by the kernels, and what it would be without each of its losses.

    bf16, fp8: milliseconds by part of a step, from `traces.sum_by_part`. In 8 bits a product could
    take half of its time in bf16; whatever a step takes beyond that is a loss.
    """
    total = sum(fp8.values())
    return {
        "bf16 ÷ fp8": sum(bf16.values()) / total,
        **{
            f"without {name}": sum(bf16.values()) / (total - loss)
            for name, loss in list_losses(bf16, fp8).items()
        },
    }


def list_losses(bf16: dict[str, float], fp8: dict[str, float]) -> dict[str, float]:
    """Return the milliseconds of each loss of fp8."""
    in_16_bits = "products in 16 bits"
    in_8_bits = "products in 8 bits"
    losses = {
        "slow products in 8 bits": fp8[in_8_bits] - (bf16[in_16_bits] - fp8[in_16_bits]) / 2,
        traces.CASTS: fp8[traces.CASTS] - bf16[traces.CASTS],
    }
    return losses | {
        f"slower {part}": fp8[part] - bf16[part] for part in ("attention", "update", "FSDP", "rest")
    }


def gain_limit(bf16: dict[str, float], fp8: dict[str, float]) -> str:
    """Return the largest loss of fp8, and the gain that is possible without any."""
    name, loss = max(list_losses(bf16, fp8).items(), key=lambda item: item[1])
    possible = sum(bf16.values()) / (sum(fp8.values()) - sum(list_losses(bf16, fp8).values()))
    return f"{name} ({loss:.1f} ms); without any loss it would be {possible:.2f} × bf16"


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
