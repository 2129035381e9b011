"""Items for two GPUs or more: NCCL, replicas, the device of saving threads, a rank that hangs.

A rehearsal uses two gloo ranks.
"""

from __future__ import annotations

import re

from tests.gpu import traces
from tests.gpu.place import Place
from tests.gpu.runs import FP32_TOLERANCE, read_digests, small_run_options
from tests.gpu.speed import run_bench, run_measured, summarise_run

_MAX_EXPOSED_SHARE = 0.3  # of NCCL's kernel time, without another kernel running at the same time
_MUON_TOLERANCE = 1e-3  # relative; it rounds its updates to bf16
_MIN_SCALING = 0.8  # tokens per second of each of all GPUs, relative to a run on one


def count_ranks(place: Place) -> int:
    """Return the number of ranks to start, an even number."""
    return place.gpus // 2 * 2 if place.on_gpu else 2


def sharding_options(count: int) -> dict[str, tuple[object, ...]]:
    """Return the options for each way to shard over `count` ranks, by name."""
    ways: dict[str, tuple[object, ...]] = {"sharded": (), "replicas": ("--shard-size", 1)}
    if count >= 4:
        ways["replicas of two"] = ("--shard-size", 2)
    return ways


def collectives(place: Place) -> None:
    """All ranks together, sharded or replicated, give the losses of one rank that accumulates."""
    count = count_ranks(place)
    for optimizer, tolerance in {"adamw": FP32_TOLERANCE, "muon": _MUON_TOLERANCE}.items():
        options = small_run_options(
            place,
            *("--optimizer", optimizer, "--max-steps", 5, "--precision", "fp32"),
            *("-b", 1, "--global-batch-size", 4 * count),
        )
        expected = place.train(optimizer, *options, ranks=1, hook="skip_saves").losses
        for name, way in sharding_options(count).items():
            experiment = f"{optimizer}-{name}".replace(" ", "-")
            run = place.train(experiment, *options, *way, ranks=count, hook="skip_saves")
            worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
            place.note(**{f"{optimizer}, {name}, {count} ranks": worst})
            assert worst < tolerance, (optimizer, name, run.losses, expected)


def scaling(place: Place) -> None:
    """Compare tokens per second of each of all GPUs with a run on one, for each way to shard.

    The memory check is not skipped here, since it decides which blocks stay gathered.
    """
    count = count_ranks(place)
    compiled = ("--compile", place.size("on", "off"))
    for model in place.size(("1b", "8b-wide"), ("small",)):
        one_rank = summarise_run(
            run_measured(place, f"{model}, one rank", model, 8192, 2, *compiled, ranks=1)
        )
        for name, way in sharding_options(count).items():
            all_ranks = summarise_run(
                run_measured(
                    place,
                    f"{model}, {name}".replace(" ", "-"),
                    model,
                    8192,
                    2,
                    *compiled,
                    *way,
                    ranks=count,
                    hook="skip_saves",
                )
            )
            ratio = (
                all_ranks["perf/tokens_per_sec_per_device"]
                / one_rank["perf/tokens_per_sec_per_device"]
            )
            place.note(**{f"{model}, {name}, {count} ranks ÷ one": ratio})
            assert not place.on_gpu or name != "sharded" or ratio > _MIN_SCALING, (model, ratio)


def communication(place: Place) -> None:
    """Other kernels hide all but 30 % of NCCL's time, in the trace of two steps."""
    count = count_ranks(place)
    for model in place.size(("8b-wide", "1b"), ("small",)):
        run = run_measured(
            place,
            model,
            model,
            8192,
            2,
            "--compile",
            place.size("on", "off"),
            "--profile",
            "7:8",
            steps=9,
            ranks=count,
            hook="skip_saves",
        )
        nccl, exposed = traces.measure_communication(traces.load_trace(run))
        place.note(**{model: {"nccl ms of two steps": nccl, "exposed ms": exposed}})
        if place.on_gpu:
            assert nccl, "the trace has no kernel of NCCL"
            place.note(**{f"{model}, exposed share": exposed / nccl})
            assert exposed < _MAX_EXPOSED_SHARE * nccl, f"{model}: {exposed:.0f} of {nccl:.0f} ms"


def bench_shares(place: Place) -> None:
    """`--bench` on all ranks measures a share of communication, and most of it is overlapped."""
    result = run_bench(
        place, "bench", place.size("8b-wide", "small"), 8192, 2, ranks=count_ranks(place)
    )
    total = result["communication/total"]
    exposed = result["communication/exposed"]
    assert total and 0 <= exposed <= total < 1, (total, exposed)
    if place.on_gpu:
        assert exposed < _MAX_EXPOSED_SHARE * total, f"exposed {exposed:.3f} of {total:.3f}"


def saving_threads(place: Place) -> None:
    """Asynchronous saves write the bytes of synchronous ones; no rank uses another rank's GPU."""
    digests = []
    for asynchronous in ("on", "off"):
        run = place.train(
            f"async-{asynchronous}",
            *small_run_options(
                place,
                "--max-steps",
                8,
                "--ckpt-freq",
                4,
                "--ckpt-keep",
                0,
                "--deterministic",
                "on",
                "--ckpt-async",
                asynchronous,
            ),
            ranks=count_ranks(place),
            hook="print_gpu_processes",
        )
        digests.append(read_digests(run))
        contexts = re.findall(r"\('([^']+)', '(\d+)'\)", run.printed)
        assert len({process for _, process in contexts}) == len(contexts), (
            f"a process has a context on two GPUs: {contexts}"
        )
        place.note(**{f"contexts, async {asynchronous}": len(contexts)})
    assert digests[0] == digests[1]
    place.need(
        contexts or not place.on_gpu, "the driver does not report which process uses which GPU"
    )


def late_rank(place: Place) -> None:
    """If a rank hangs, all end; logs/ contains stacks and the flight recorder's dump."""
    run = place.train(
        "late",
        *small_run_options(place, "--max-steps", 9, "--watchdog-minutes", place.size(0.3, 0.05)),
        ranks=count_ranks(place),
        hook="hang_last_rank",
        expect=1,
    )
    files = sorted(path.name for path in (run.experiment / "logs").iterdir())
    place.note(files=files)
    assert "watchdog: the step has not ended" in run.printed
    assert any(name.endswith(".stacks.txt") for name in files)
    assert any(name.endswith(".collectives.json") for name in files), files
