"""Items about models with experts: numbers, host waits, recomputation and speed."""

from __future__ import annotations

from tests.gpu import hooks, traces
from tests.gpu.place import Place
from tests.gpu.runs import SAME, shape
from tests.gpu.speed import figures, in_words, keep_table, measured

_ROUNDED = 1e-2  # relative difference of a loss by the order of sums in bf16


def experts(place: Place) -> None:
    """Experts give the same losses recomputed or not, compiled or not; fp16 starts alike."""
    settings = {
        "none": ("none", "off"),
        "selective": ("selective", "off"),
        "full": ("full", "off"),
        **place.size({"none, compiled": ("none", "on"), "full, compiled": ("full", "on")}, {}),
    }
    expected: list[float] = []
    for precision, most in place.size({"fp32": SAME, "bf16": _ROUNDED}, {"fp32": SAME}).items():
        for name, (kind, compiled) in settings.items():
            if precision == "fp32" and compiled == "on":
                continue  # real runs compile bf16
            run = place.train(
                f"{precision}-{kind}-{compiled}",
                *shape(
                    place,
                    "--max-steps",
                    4,
                    "--precision",
                    precision,
                    "--activation-checkpointing",
                    kind,
                    "--compile",
                    compiled,
                ),
                model="moe-small",
                hook="save_nothing",
            )
            expected = expected or run.losses
            worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
            place.note(**{f"{precision}, {name}": worst})
            assert worst < most, (precision, name, run.losses, expected)
    if place.on_gpu:
        run = place.train(
            "fp16",
            *shape(place, "--max-steps", 4, "--precision", "fp16"),
            model="moe-small",
            hook="save_nothing",
        )
        # Only the first loss: the loss scale may skip steps before it suits the gradients.
        place.note(fp16=abs(run.losses[0] / expected[0] - 1))
        assert abs(run.losses[0] / expected[0] - 1) < _ROUNDED, (run.losses, expected)


def experts_wait(place: Place) -> None:
    """The host does not wait for the GPU while experts of bf16 compute."""
    for compiled in place.size(("on", "off"), ("off",)):
        run = place.train(
            f"compile-{compiled}",
            *shape(place, "--max-steps", 9, "--log-freq", 9, "--compile", compiled),
            model="moe-small",
            hook="forbid_host_syncs",
        )
        assert hooks.NO_SYNC in run.printed
    place.note(steps=3, waits=0)


def experts_speed(place: Place) -> None:
    """Tokens per second of a model with 128 experts, and the kernels that their backward takes."""
    run = measured(
        place,
        "run",
        "moe",
        4096,
        4,
        "--compile",
        place.size("on", "off"),
        "--profile",
        place.size("18:18", "8:8"),
    )
    events = traces.load(run)
    by_index = [
        event
        for event in traces.kernels(events)
        if "indexing_backward" in event["name"] or "index_put" in event["name"]
    ]
    place.note(
        in_one_line=in_words(figures(run)),
        dearest=traces.dearest(events),
        kernels_that_add_by_index=len(by_index),
        ms_of_them=traces.milliseconds(by_index),
    )
    keep_table(place, "moe", run)
    said = [line for line in run.printed.splitlines() if line.startswith("experts: ")]
    place.note(said=said)
    # If the log names the function for experts, its gradients must need no sum by index.
    assert not (said and by_index), f"{len(by_index)} kernels add gradients by index"
