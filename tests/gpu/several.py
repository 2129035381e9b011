"""Items for two GPUs or more: NCCL, replicas, the device of saving threads, a rank that is late.

In a rehearsal two ranks of gloo stand in.
"""

from __future__ import annotations

import re

from tests.gpu.place import Place
from tests.gpu.runs import SAME, digests, shape, speed


def ranks(place: Place) -> int:
    """Return how many ranks there are to be; an even number."""
    return place.gpus // 2 * 2 if place.on_gpu else 2


def collectives(place: Place) -> None:
    """Any number of ranks, sharded or in replicas, learns what one rank does."""
    count = ranks(place)
    options = shape(place, "--max-steps", 5, "-b", 1, "--global-batch-size", count, "--precision",
                    "fp32")
    expected = place.train("one", *options, ranks=1, hook="save_nothing").losses
    for name, more in {"sharded": (), "replicas": ("--shard-size", max(1, count // 2))}.items():
        run = place.train(name, *options, *more, ranks=count, hook="save_nothing")
        worst = max(abs(a / b - 1) for a, b in zip(run.losses, expected, strict=True))
        place.note(**{f"{name}, {count} ranks": worst})
        assert worst < SAME, (name, run.losses, expected)
        if place.on_gpu:
            fast = place.train(f"{name}-fast", *shape(place, "--max-steps", 16), *more, model="1b",
                               ranks=count, hook="save_nothing")
            place.note(**{f"{name}, speed of the 1B": speed(fast)})


def saving_threads(place: Place) -> None:
    """Saves beside training are those of before the next step, and no rank uses another's GPU."""
    found = []
    for asynchronous in ("on", "off"):
        run = place.train(f"async-{asynchronous}", *shape(
            place, "--max-steps", 8, "--ckpt-freq", 4, "--ckpt-keep", 0, "--deterministic", "on",
            "--ckpt-async", asynchronous), ranks=ranks(place), hook="tell_memory")
        found.append(digests(run))
        contexts = re.findall(r"\('([^']+)', '(\d+)'\)", run.printed)
        assert len({process for _, process in contexts}) == len(contexts), \
            f"a process has a context on two GPUs: {contexts}"
        place.note(**{f"contexts, async {asynchronous}": len(contexts)})
    assert found[0] == found[1]
    place.need(contexts or not place.on_gpu, "the driver does not tell who uses which GPU")


def late_rank(place: Place) -> None:
    """A rank that stands still ends all, with stacks and the flight recorder's dump."""
    run = place.train("late", *shape(place, "--max-steps", 9, "--watchdog-minutes",
                                     place.size(0.3, 0.05)), ranks=ranks(place), hook="hang",
                      expect=1)
    files = sorted(path.name for path in (run.experiment / "logs").iterdir())
    place.note(files=files)
    assert "watchdog: the step has not ended" in run.printed
    assert any(name.endswith(".stacks.txt") for name in files)
    assert any(name.endswith(".collectives.json") for name in files), files
