"""List the options that save memory, and combine them into settings that may fit.

All suggestions of what would fit instead come from KNOBS, in the order of what they cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from lib.optim.registry import OPTIMIZERS
from lib.parallel.degrees import RECOMPUTATIONS, list_more_recomputation
from lib.planning.trace import StepConfig

RECOMPUTE_OPTION = "--activation-checkpointing"
BATCH_OPTION = "-b"
SHARD_OPTION = "--shard-size"
_MAX_DOUBLINGS = 6  # of the ranks
_MIN_SEQ_LENGTH = 256  # tokens, to which a sequence is shortened

Turned = Iterator[tuple[str, StepConfig]]


class Knob(NamedTuple):
    """An option that saves memory.

    cost: its price, for people. turn: (step, on_gpu) → values of the option with the steps that
    they give, the cheapest first. is_kept: the knobs after it are turned together with its last
    value. adds_ranks: it takes a launch on more ranks.
    """

    option: str
    cost: str
    turn: Callable[[StepConfig, bool], Turned]
    is_kept: bool = True
    adds_ranks: bool = False


class Alternative(NamedTuple):
    """A step with other settings. options: values to type; more_ranks: it takes more ranks."""

    options: dict[str, str]
    case: StepConfig
    more_ranks: bool = False

    def words(self, without: str = "") -> list[str]:
        """Return the options as words of a command, except one that need not be typed."""
        return [word for option in self.options.items() if option[0] != without for word in option]


def _gather_again(step: StepConfig, on_gpu: bool) -> Turned:
    if step.keep_gathered:
        yield "off", replace(step, keep_gathered=False)


def _recompute_more(step: StepConfig, on_gpu: bool) -> Turned:
    for kind in list_more_recomputation(step.recompute):
        yield kind, replace(step, recompute=kind)


def _shrink_batch(step: StepConfig, on_gpu: bool) -> Turned:
    for batch in reversed(range(1, step.batch)):
        if step.batch % batch == 0:  # so that a global batch is still divided evenly
            yield str(batch), replace(step, batch=batch, accumulates=True)


def _shard_over_all_ranks(step: StepConfig, on_gpu: bool) -> Turned:
    if step.shard_size < step.ranks:
        yield str(step.ranks), replace(step, shard_size=step.ranks)


def _add_ranks(step: StepConfig, on_gpu: bool) -> Turned:
    for doublings in range(1, _MAX_DOUBLINGS + 1):
        ranks = step.ranks << doublings
        yield str(ranks), replace(step, ranks=ranks, shard_size=ranks)


def _shrink_states(step: StepConfig, on_gpu: bool) -> Turned:
    if smaller := OPTIMIZERS[step.optimizer].smaller:
        yield smaller, replace(step, optimizer=smaller)


def _offload(step: StepConfig, on_gpu: bool) -> Turned:
    if on_gpu and not step.offload:
        yield "on", replace(step, offload=True)


def _shorten_sequences(step: StepConfig, on_gpu: bool) -> Turned:
    while step.seq_length >= 2 * _MIN_SEQ_LENGTH:
        step = replace(step, seq_length=step.seq_length // 2)
        yield str(step.seq_length), step


KNOBS = (
    Knob("--keep-gathered", "a second all-gather of the weights", _gather_again),
    Knob(RECOMPUTE_OPTION, "5 % of the time if selective, 30 % if full", _recompute_more),
    Knob(BATCH_OPTION, "less work for a GPU in each pass", _shrink_batch),
    Knob(SHARD_OPTION, "more communication between nodes", _shard_over_all_ranks),
    Knob(SHARD_OPTION, "more GPUs", _add_ranks, is_kept=False, adds_ranks=True),
    Knob("--optimizer", "other rounding of the states", _shrink_states, is_kept=False),
    Knob("--cpu-offload", "copies between host and GPU in each step", _offload),
    Knob("-s", "a shorter context", _shorten_sequences, is_kept=False),
)
# As KNOBS, but a batch comes before recomputation.
_TYPED = (
    "--keep-gathered",
    BATCH_OPTION,
    RECOMPUTE_OPTION,
    SHARD_OPTION,
    "--optimizer",
    "--cpu-offload",
    "-s",
)


def cheaper_settings(asked: StepConfig, on_gpu: bool = True) -> Iterator[Alternative]:
    """Yield settings that need less memory than a step, the least costly first."""
    given: dict[str, str] = {}
    step = asked
    for knob in KNOBS:
        last = None
        for value, turned in knob.turn(step, on_gpu):
            options = {**given, knob.option: value}
            if knob.adds_ranks and SHARD_OPTION not in given:
                options = given  # without the option, all ranks share a replica
            yield Alternative(_in_order(options), turned, knob.adds_ranks)
            last = value, turned
        if knob.is_kept and last:
            given[knob.option], step = last
        if knob.option == RECOMPUTE_OPTION:
            # Named even if it is not new, since an option left at `auto` could become less.
            given[RECOMPUTE_OPTION] = RECOMPUTATIONS[-1]


def _in_order(options: dict[str, str]) -> dict[str, str]:
    """Return options in the order to type them."""
    return {name: options[name] for name in sorted(options, key=_TYPED.index)}
