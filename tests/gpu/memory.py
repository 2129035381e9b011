"""Items about memory: estimates against measured peaks, leaks, the allocator, a full GPU."""

from __future__ import annotations

import json
import re

from tests.gpu import hooks
from tests.gpu.place import Place, Stage
from tests.gpu.runs import shape

_OFF_BY = 0.1  # of the measured peak, at most, where nothing is compiled
_COMPILED_OFF_BY = 0.15  # and where blocks are; the estimate may be low by no more than _OFF_BY
_LEAK_GIB = 1 / 1024  # between two steps with the same shapes


def memory(place: Place) -> None:
    """The estimate of a run's memory is within 10 % of the measured peak; compiled, within 15 %."""
    model = place.model(
        "1b", **place.size({}, {"vocab_size": 65_536, "hidden_size": 512, "num_hidden_layers": 6})
    )
    wrong = []
    for kind, compiled, batch in place.size(
        (("none", "off", 2), ("selective", "off", 2), ("full", "off", 4), ("none", "on", 2)),
        (("none", "off", 4),),
    ):
        name = f"{kind}, compile {compiled}"
        run = place.train(
            name.replace(", ", "-").replace(" ", "-"),
            "-s",
            place.size(4096, 128),
            "-b",
            batch,
            "--max-steps",
            4,
            "--activation-checkpointing",
            kind,
            "--compile",
            compiled,
            model=model,
            hook="save_nothing",
        )
        ratio = compare_memory(place, run, name)
        if not is_near(place, ratio, compiled == "on"):
            wrong.append(f"{name}: estimated {ratio:.2f} times what was measured")
    assert not wrong, "; ".join(wrong)


def is_near(place: Place, ratio: float, compiled: bool) -> bool:
    """Return whether an estimate, divided by the measured peak, is good enough."""
    # On a CPU the allocator and libraries count too, and weigh more in a small model.
    most = place.size(_COMPILED_OFF_BY if compiled else _OFF_BY, 0.5)
    return 1 - place.size(_OFF_BY, 0.5) <= ratio <= 1 + most


def compare_memory(place: Place, run: Stage, name: str) -> float:
    """Note the peak of a run beside its estimate, and return the estimate ÷ the peak."""
    told = re.search(
        r"memory +peak .*?; ([\d.,]+ [GM])iB without.*?; ([\d.,]+ [GM])iB were "
        "estimated",
        run.printed,
    )
    assert told, "nothing was estimated:\n" + run.printed[-1500:]
    measured, estimated = map(_gib, told.groups())
    place.note(**{name: {"measured_gib": measured, "estimated_gib": estimated}})
    return estimated / measured


def _gib(told: str) -> float:
    """Return a size such as `1,234.5 M` in GiB."""
    return float(told[:-2].replace(",", "")) / (1 if told.endswith("G") else 1024)


def leak(place: Place) -> None:
    """Two hundred steps leave as much memory in use as the first twenty did."""
    first, last = place.size((20, 220), (12, 36))
    for packing in ("concat", "documents"):
        run = place.train(
            packing,
            *shape(place, "--max-steps", last, "--log-freq", 2, "--packing", packing),
            hook="save_nothing",
        )
        in_use = {row["step"]: row["memory/current_gib"] for row in run.rows}
        grown = in_use[last] - in_use[first]
        place.note(**{f"{packing}, GiB after step {step}": in_use[step] for step in (first, last)})
        # The memory of a process on a CPU grows for other reasons too.
        assert grown < place.size(_LEAK_GIB, 0.2), f"{packing}: {1024 * grown:.1f} MiB more"


def allocator(place: Place) -> None:
    """The allocator works as stage 04 asks it to: segments can grow."""
    run = place.train("allocator", *shape(place, "--max-steps", 4), hook="tell_allocator")
    told = next(line for line in run.printed.splitlines() if line.startswith(hooks.ALLOCATOR))
    found = json.loads(told.removeprefix(hooks.ALLOCATOR))
    place.note(**found)
    if place.on_gpu:
        assert found["large segments"] and found["expandable"] == found["large segments"], found
        assert not found["settings"] or "expandable_segments:True" in found["settings"], found


def out_of_memory(place: Place) -> None:
    """A GPU that is full ends the run with an error that names the setting to change first."""
    run = place.train(
        "full",
        *shape(place, "-b", place.size(256, 2), "--max-steps", 4),
        hook="fill_memory",
        expect=2,
    )
    assert "error: out of memory" in run.printed and "in this order: " in run.printed
    assert "Traceback" not in run.printed
    place.note(said=[line for line in run.printed.splitlines() if "of memory" in line][:3])
