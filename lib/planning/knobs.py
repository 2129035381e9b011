"""List the options that save memory, and combine them into settings that may fit.

Every suggestion to use less memory comes from KNOBS. This module does not import torch, so that
launchers can use it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from lib.optim.optimizers import Choice
from lib.parallel.degrees import RECOMPUTATIONS, list_more_recomputation

if TYPE_CHECKING:
    from lib.planning.trace import StepConfig

RECOMPUTE_OPTION = "--activation-checkpointing"
BATCH_OPTION = "-b"
SHARD_OPTION = "--shard-size"
CONTEXT_OPTION = "--context-parallel"
_MAX_DOUBLINGS = 6  # of the number of ranks
_MAX_ADDED_CONTEXT = 8  # ranks that share samples, if more ranks are added: those of a node
MIN_SEQ_LENGTH = 256  # tokens; no shorter sequence is suggested

ValuesWithSteps = Iterator[tuple[str, "StepConfig"]]


class Knob(NamedTuple):
    """An option that saves memory.

    remedy: what to do, in words. cost: the price of it, in words. list_values: returns for a step
    the values of the option that need less memory, each with the resulting step, the cheapest
    first. is_kept: its last value stays set while the knobs after it are tried. is_optional: these
    are tried with and without its last value. adds_ranks: it needs a launch on more ranks.
    changes_run: a run that has begun cannot change it.
    """

    option: str
    remedy: str
    cost: str
    list_values: Callable[[StepConfig], ValuesWithSteps]
    is_kept: bool = True
    is_optional: bool = False
    adds_ranks: bool = False
    changes_run: bool = False


class Alternative(NamedTuple):
    """A step with other settings. options: values to type; more_ranks: it needs more ranks."""

    options: dict[str, str]
    case: StepConfig
    more_ranks: bool = False

    def words(self, without: str = "") -> list[str]:
        """Return the options as words of a command. without: an option to leave out."""
        return [word for option in self.options.items() if option[0] != without for word in option]


def _recompute_more(step: StepConfig) -> ValuesWithSteps:
    for kind in list_more_recomputation(step.recompute):
        yield kind, replace(step, recompute=kind)


def _shrink_batch(step: StepConfig) -> ValuesWithSteps:
    for batch in reversed(range(1, step.batch)):
        if step.batch % batch == 0:  # so that a global batch is still divided evenly
            yield str(batch), replace(step, batch=batch, accumulates=True)


def _shard_over_all_ranks(step: StepConfig) -> ValuesWithSteps:
    if step.shard_size < step.ranks:
        yield str(step.ranks), replace(step, shard_size=step.ranks)


def _divide_samples(step: StepConfig) -> ValuesWithSteps:
    """Yield the multiples of today's degree, so that a global batch is still divided evenly."""
    for ranks in range(2 * step.context, step.shard_size + 1, step.context):
        if step.shard_size % ranks == 0:
            yield str(ranks), replace(step, context=ranks, accumulates=True)


def _add_ranks(step: StepConfig) -> ValuesWithSteps:
    for doublings in range(1, _MAX_DOUBLINGS + 1):
        ranks = step.ranks << doublings
        wider = replace(step, ranks=ranks, shard_size=ranks)
        yield str(ranks), wider
        if step.context << doublings <= _MAX_ADDED_CONTEXT:
            yield str(ranks), replace(wider, context=step.context << doublings)


def _shrink_states(step: StepConfig) -> ValuesWithSteps:
    if smaller := step.optimizer.spec.smaller:
        yield smaller, replace(step, optimizer=Choice(smaller))


def _offload_activations(step: StepConfig) -> ValuesWithSteps:
    if step.on_gpu and not step.activation_offload:
        yield "on", replace(step, activation_offload=True, recompute=RECOMPUTATIONS[-1])


def _offload(step: StepConfig) -> ValuesWithSteps:
    if step.on_gpu and not step.offload:
        yield "on", replace(step, offload=True)


def _shorten_sequences(step: StepConfig) -> ValuesWithSteps:
    while step.seq_length >= 2 * MIN_SEQ_LENGTH:
        step = replace(step, seq_length=step.seq_length // 2)
        yield str(step.seq_length), step


# The least costly first.
KNOBS = (
    Knob(
        RECOMPUTE_OPTION,
        remedy=f"{RECOMPUTE_OPTION} selective, then full",
        cost="about 5 % of the time if selective, 30 % if full",
        list_values=_recompute_more,
    ),
    Knob(
        BATCH_OPTION,
        remedy=f"a smaller {BATCH_OPTION} with the same --global-batch-size",
        cost="less work for the device in each pass",
        list_values=_shrink_batch,
    ),
    Knob(
        "--activation-offload",
        remedy="--activation-offload on",
        cost="full recomputation, and copies between host and GPU while blocks compute",
        list_values=_offload_activations,
        is_optional=True,
    ),
    Knob(
        SHARD_OPTION,
        remedy=f"{SHARD_OPTION} of all ranks",
        cost="more communication between nodes",
        list_values=_shard_over_all_ranks,
    ),
    Knob(
        CONTEXT_OPTION,
        remedy=f"{CONTEXT_OPTION}, which divides each sample over ranks",
        cost="an exchange between these ranks in each layer",
        list_values=_divide_samples,
        is_optional=True,
    ),
    Knob(
        SHARD_OPTION,
        remedy="more ranks to shard over",
        cost="more devices",
        list_values=_add_ranks,
        is_kept=False,
        adds_ranks=True,
    ),
    Knob(
        "--optimizer",
        remedy="a new run with an --optimizer that has smaller states",
        cost="coarser rounding of the optimizer states",
        list_values=_shrink_states,
        is_kept=False,
        changes_run=True,
    ),
    Knob(
        "--cpu-offload",
        remedy="--cpu-offload on",
        cost="copies between host and GPU in each step",
        list_values=_offload,
    ),
    Knob(
        "-s",
        remedy="a new run with a smaller -s",
        cost="a shorter context",
        list_values=_shorten_sequences,
        is_kept=False,
        changes_run=True,
    ),
)
# The order in which options are printed. It differs from KNOBS: the batch precedes recomputation.
_PRINTED_ORDER = (
    BATCH_OPTION,
    RECOMPUTE_OPTION,
    "--activation-offload",
    SHARD_OPTION,
    CONTEXT_OPTION,
    "--optimizer",
    "--cpu-offload",
    "-s",
)


def list_remedies(step: StepConfig) -> list[str]:
    """Return the remedies for a step that needs too much memory, with their costs."""
    return [f"{knob.remedy}: {knob.cost}" for knob in KNOBS if any(knob.list_values(step))]


def cheaper_settings(first_step: StepConfig, has_begun: bool = False) -> Iterator[Alternative]:
    """Yield settings that need less memory than a step, the least costly first.

    has_begun: leave out settings that a run cannot change once it has begun.
    """
    # The settings that are kept, from which the knobs that follow start.
    kept = [Alternative({}, replace(first_step, keep_gathered=False))]  # as with less memory
    for knob in KNOBS:
        if has_begun and knob.changes_run:
            continue
        found = [_list_alternatives(knob, start) for start in kept]
        # With more ranks, the fewest come first, whatever is kept.
        yield from sorted(chain.from_iterable(found), key=lambda setting: setting.case.ranks)
        if knob.is_optional:
            kept += [settings[-1] for settings in found if settings]
        elif knob.is_kept:
            kept = [[start, *settings][-1] for start, settings in zip(kept, found, strict=True)]
        if knob.option == RECOMPUTE_OPTION:
            # Named even if it is not new, since an option left at `auto` could become less.
            most = {RECOMPUTE_OPTION: RECOMPUTATIONS[-1]}
            kept = [start._replace(options=start.options | most) for start in kept]


def _list_alternatives(knob: Knob, start: Alternative) -> list[Alternative]:
    """Return the settings of a knob that need less memory than `start`, with the options kept."""
    settings = []
    for value, step in knob.list_values(start.case):
        options = {**start.options, knob.option: value}
        if knob.adds_ranks and SHARD_OPTION not in start.options:
            del options[SHARD_OPTION]  # without the option, all ranks share a replica
        if step.context > start.case.context:
            options[CONTEXT_OPTION] = str(step.context)
        settings.append(Alternative(_sort_options(options), step, knob.adds_ranks))
    return settings


def _sort_options(options: dict[str, str]) -> dict[str, str]:
    """Return options in the order in which they are printed."""
    return {name: options[name] for name in sorted(options, key=_PRINTED_ORDER.index)}
