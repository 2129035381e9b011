"""Items about memory: estimates and measured peaks, leaks, the allocator, a full GPU."""

from __future__ import annotations

import json
import re

from tests.gpu import hooks
from tests.gpu.place import Place, Stage
from tests.gpu.runs import small_run_options

_TOLERANCE = 0.1  # of the measured peak, if nothing is compiled
_COMPILED_TOLERANCE = 0.15  # if blocks are compiled; an estimate may be too low only by _TOLERANCE
_MAX_GROWTH_GIB = 1 / 1024  # between two steps with equal shapes


def memory(place: Place) -> None:
    """The memory estimate is within 10 % of the measured peak; for compiled runs, within 15 %."""
    model = place.model(
        "1b", **place.size({}, {"vocab_size": 65_536, "hidden_size": 512, "num_hidden_layers": 6})
    )
    problems = []
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
            hook="skip_saves",
        )
        ratio = note_memory_ratio(place, run, name)
        if not is_estimate_near(place, ratio, compiled == "on"):
            problems.append(f"{name}: estimated {ratio:.2f} times what was measured")
    assert not problems, "; ".join(problems)


def is_estimate_near(place: Place, ratio: float, compiled: bool) -> bool:
    """Return whether an estimate is good enough. ratio: the estimate ÷ the measured peak."""
    # On a CPU the measured peak includes the allocator's overhead and the libraries.
    tolerance = place.size(_COMPILED_TOLERANCE if compiled else _TOLERANCE, 0.5)
    return 1 - place.size(_TOLERANCE, 0.5) <= ratio <= 1 + tolerance


def note_memory_ratio(place: Place, run: Stage, name: str) -> float:
    """Note the measured and the estimated peak of a run; return the estimate ÷ the peak."""
    match = re.search(
        r"memory +peak .*?; ([\d.,]+ [GM])iB without.*?; ([\d.,]+ [GM])iB were "
        "estimated",
        run.printed,
    )
    assert match, "the run printed no estimate:\n" + run.printed[-1500:]
    measured, estimated = map(_parse_gib, match.groups())
    place.note(**{name: {"measured_gib": measured, "estimated_gib": estimated}})
    return estimated / measured


def _parse_gib(text: str) -> float:
    """Return the GiB of a size such as `1,234.5 M`, which is in MiB."""
    return float(text[:-2].replace(",", "")) / (1 if text.endswith("G") else 1024)


def leak(place: Place) -> None:
    """After 220 steps no more memory is in use than after 20."""
    first_step, last_step = place.size((20, 220), (12, 36))
    for packing in ("concat", "documents"):
        run = place.train(
            packing,
            *small_run_options(
                place, "--max-steps", last_step, "--log-freq", 2, "--packing", packing
            ),
            hook="skip_saves",
        )
        gib_in_use = {row["step"]: row["memory/current_gib"] for row in run.rows}
        growth = gib_in_use[last_step] - gib_in_use[first_step]
        place.note(
            **{
                f"{packing}, GiB after step {step}": gib_in_use[step]
                for step in (first_step, last_step)
            }
        )
        # The memory of a process on a CPU grows for other reasons too.
        assert growth < place.size(_MAX_GROWTH_GIB, 0.2), f"{packing}: {1024 * growth:.1f} MiB more"


def allocator(place: Place) -> None:
    """The allocator's segments can grow, as stage 04 configures it."""
    run = place.train(
        "allocator", *small_run_options(place, "--max-steps", 4), hook="print_allocator"
    )
    printed_line = next(
        line for line in run.printed.splitlines() if line.startswith(hooks.ALLOCATOR_LINE)
    )
    facts = json.loads(printed_line.removeprefix(hooks.ALLOCATOR_LINE))
    place.note(**facts)
    if place.on_gpu:
        assert facts["large segments"] and facts["expandable"] == facts["large segments"], facts
        assert not facts["settings"] or "expandable_segments:True" in facts["settings"], facts


def out_of_memory(place: Place) -> None:
    """If GPU memory runs out, the run ends with an error that names the option to change first."""
    run = place.train(
        "full",
        *small_run_options(place, "-b", place.size(256, 2), "--max-steps", 4),
        hook="fill_memory",
        expect=2,
    )
    assert "error: out of memory" in run.printed and "in this order" in run.printed
    assert "Traceback" not in run.printed
    place.note(said=[line for line in run.printed.splitlines() if "of memory" in line][:3])
