"""Items about models with experts: losses, recomputation, host syncs and speed."""

from __future__ import annotations

from tests.gpu import hooks, traces
from tests.gpu.place import Place
from tests.gpu.runs import FP32_TOLERANCE, small_run_options
from tests.gpu.speed import append_profile, describe_figures, run_measured, summarise_run

_BF16_TOLERANCE = 1e-2  # relative difference of a loss that another order of sums may cause in bf16


def experts(place: Place) -> None:
    """Experts give the same losses recomputed or not and compiled or not; fp16 starts with them."""
    settings = {
        "none": ("none", "off"),
        "selective": ("selective", "off"),
        "full": ("full", "off"),
        **place.size({"none, compiled": ("none", "on"), "full, compiled": ("full", "on")}, {}),
    }
    expected: list[float] = []
    for precision, tolerance in place.size(
        {"fp32": FP32_TOLERANCE, "bf16": _BF16_TOLERANCE}, {"fp32": FP32_TOLERANCE}
    ).items():
        for name, (kind, compiled) in settings.items():
            if precision == "fp32" and compiled == "on":
                continue  # real runs compile bf16
            run = place.train(
                f"{precision}-{kind}-{compiled}",
                *small_run_options(
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
                hook="skip_saves",
            )
            expected = expected or run.losses
            worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
            place.note(**{f"{precision}, {name}": worst})
            assert worst < tolerance, (precision, name, run.losses, expected)
    if place.on_gpu:
        run = place.train(
            "fp16",
            *small_run_options(place, "--max-steps", 4, "--precision", "fp16"),
            model="moe-small",
            hook="skip_saves",
        )
        # Only the first loss is compared: the loss scale may skip the next steps until it fits.
        place.note(fp16=abs(run.losses[0] / expected[0] - 1))
        assert abs(run.losses[0] / expected[0] - 1) < _BF16_TOLERANCE, (run.losses, expected)


def experts_wait(place: Place) -> None:
    """The host does not wait for the GPU while experts compute in bf16."""
    for compiled in place.size(("on", "off"), ("off",)):
        run = place.train(
            f"compile-{compiled}",
            *small_run_options(place, "--max-steps", 9, "--log-freq", 9, "--compile", compiled),
            model="moe-small",
            hook="forbid_host_syncs",
        )
        assert hooks.NO_SYNC_LINE in run.printed
    place.note(steps=3, waits=0)


def experts_speed(place: Place) -> None:
    """Measure tokens per second with 128 experts, and the kernels of their backward pass."""
    run = run_measured(
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
    events = traces.load_trace(run)
    index_kernels = [
        event
        for event in traces.find_kernels(events)
        if "indexing_backward" in event["name"] or "index_put" in event["name"]
    ]
    place.note(
        in_one_line=describe_figures(summarise_run(run)),
        dearest=traces.find_slowest(events),
        kernels_that_add_by_index=len(index_kernels),
        ms_of_them=traces.sum_milliseconds(index_kernels),
    )
    append_profile(place, "moe", run)
    log_lines = [line for line in run.log_lines if line.startswith("experts: ")]
    place.note(said=log_lines)
    # If the log names the function for experts, its gradients must need no sum by index.
    assert not (log_lines and index_kernels), f"{len(index_kernels)} kernels add gradients by index"
