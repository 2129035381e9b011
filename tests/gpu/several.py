"""Items for two GPUs or more: NCCL, replicas, the device of saving threads, a rank that is late.

In a rehearsal two ranks of gloo stand in.
"""

from __future__ import annotations

import re

from tests.gpu import traces
from tests.gpu.place import Place
from tests.gpu.runs import SAME, digests, shape
from tests.gpu.speed import figures, measured

_EXPOSED = 0.3  # at most, of NCCL's kernel time without another kernel running beside it
_SCALING = 0.8  # tokens per second of a GPU among all, relative to one alone


def ranks(place: Place) -> int:
    """Return how many ranks there are to be; an even number."""
    return place.gpus // 2 * 2 if place.on_gpu else 2


def sharding(count: int) -> dict[str, tuple[object, ...]]:
    """Return the options for each way to shard over so many ranks."""
    found: dict[str, tuple[object, ...]] = {"sharded": (), "replicas": ("--shard-size", 1)}
    if count >= 4:
        found["replicas of two"] = ("--shard-size", 2)
    return found


def collectives(place: Place) -> None:
    """Any number of ranks, sharded or in replicas, learns what one rank does, with accumulation."""
    count = ranks(place)
    options = shape(
        place, "--max-steps", 5, "-b", 1, "--global-batch-size", 4 * count, "--precision", "fp32"
    )
    expected = place.train("one", *options, ranks=1, hook="save_nothing").losses
    for name, more in sharding(count).items():
        run = place.train(name.replace(" ", "-"), *options, *more, ranks=count, hook="save_nothing")
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        place.note(**{f"{name}, {count} ranks": worst})
        assert worst < SAME, (name, run.losses, expected)


def scaling(place: Place) -> None:
    """Tokens per second of each GPU among all beside one alone, by ways to shard.

    The memory plan is not skipped here, since it decides what stays gathered.
    """
    count = ranks(place)
    compiled = ("--compile", place.size("on", "off"))
    for model in place.size(("1b", "8b-wide"), ("small",)):
        alone = figures(measured(place, f"{model}, one rank", model, 8192, 2, *compiled, ranks=1))
        for name, more in sharding(count).items():
            reached = figures(
                measured(
                    place,
                    f"{model}, {name}".replace(" ", "-"),
                    model,
                    8192,
                    2,
                    *compiled,
                    *more,
                    ranks=count,
                    hook="save_nothing",
                )
            )
            share = (
                reached["perf/tokens_per_sec_per_device"] / alone["perf/tokens_per_sec_per_device"]
            )
            place.note(**{f"{model}, {name}, {count} ranks ÷ one": share})
            assert not place.on_gpu or name != "sharded" or share > _SCALING, (model, share)


def communication(place: Place) -> None:
    """The share of NCCL's time that nothing hides, from the trace of two steps."""
    count = ranks(place)
    for model in place.size(("8b-wide", "1b"), ("small",)):
        run = measured(
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
            hook="save_nothing",
        )
        nccl, exposed = traces.communication(traces.load(run))
        place.note(**{model: {"nccl ms of two steps": nccl, "exposed ms": exposed}})
        if place.on_gpu:
            assert nccl, "the trace has no kernel of NCCL"
            place.note(**{f"{model}, exposed share": exposed / nccl})
            assert exposed < _EXPOSED * nccl, f"{model}: {exposed:.0f} of {nccl:.0f} ms"


def gathering(place: Place) -> None:
    """Speed with blocks that stay gathered through a step, relative to gathering them again."""
    count = ranks(place)
    for passes in place.size((1, 4), (2,)):
        rates = {}
        for kept in ("off", "on"):
            run = measured(
                place,
                f"kept-{kept}-{passes}",
                "8b-wide",
                8192,
                1,
                "--compile",
                place.size("on", "off"),
                "--grad-accum-steps",
                passes,
                "--keep-gathered",
                kept,
                ranks=count,
                steps=10,
            )
            rates[kept] = figures(run)["perf/tokens_per_sec_per_device"]
        place.note(**{f"once ÷ twice, {passes} passes a step": rates["on"] / rates["off"]})


def saving_threads(place: Place) -> None:
    """Saves beside training are those of before the next step, and no rank uses another's GPU."""
    found = []
    for asynchronous in ("on", "off"):
        run = place.train(
            f"async-{asynchronous}",
            *shape(
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
            ranks=ranks(place),
            hook="tell_memory",
        )
        found.append(digests(run))
        contexts = re.findall(r"\('([^']+)', '(\d+)'\)", run.printed)
        assert len({process for _, process in contexts}) == len(contexts), (
            f"a process has a context on two GPUs: {contexts}"
        )
        place.note(**{f"contexts, async {asynchronous}": len(contexts)})
    assert found[0] == found[1]
    place.need(contexts or not place.on_gpu, "the driver does not tell who uses which GPU")


def late_rank(place: Place) -> None:
    """A rank that stands still ends all, with stacks and the flight recorder's dump."""
    run = place.train(
        "late",
        *shape(place, "--max-steps", 9, "--watchdog-minutes", place.size(0.3, 0.05)),
        ranks=ranks(place),
        hook="hang",
        expect=1,
    )
    files = sorted(path.name for path in (run.experiment / "logs").iterdir())
    place.note(files=files)
    assert "watchdog: the step has not ended" in run.printed
    assert any(name.endswith(".stacks.txt") for name in files)
    assert any(name.endswith(".collectives.json") for name in files), files
