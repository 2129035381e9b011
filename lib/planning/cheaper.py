"""Other settings of a step that need less memory, the least costly first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lib.optim.registry import OPTIMIZERS
from lib.parallel.degrees import list_more_recomputation
from lib.planning.trace import StepConfig

RECOMPUTE_OPTION = "--activation-checkpointing"
GATHER_OPTION = "--keep-gathered"


class Alternative(NamedTuple):
    """A step with other settings. options: what to type instead, in the order of their cost."""

    options: dict[str, str]
    case: StepConfig
    more_ranks: bool = False

    def words(self, without: str = "") -> list[str]:
        """Return the options as words of a command, except one that need not be typed."""
        return [word for option in self.options.items() if option[0] != without for word in option]


def cheaper_settings(asked: StepConfig, on_gpu: bool = True) -> Iterator[Alternative]:
    """Yield other settings, the least costly first."""
    off = {GATHER_OPTION: "off"} if asked.keep_gathered else {}
    if off:
        asked = replace(asked, keep_gathered=False)
        yield Alternative(off, asked)
    for kind in list_more_recomputation(asked.recompute):
        yield Alternative({**off, RECOMPUTE_OPTION: kind}, replace(asked, recompute=kind))
    case = replace(asked, recompute="full")
    for batch in reversed(range(1, asked.batch)):
        if asked.batch % batch == 0:  # so that a global batch is still divided evenly
            case = replace(case, batch=batch, accumulates=True)
            yield Alternative({**off, "-b": str(batch), RECOMPUTE_OPTION: "full"}, case)
    given = {
        **off,
        **({"-b": str(case.batch)} if asked.batch > 1 else {}),
        RECOMPUTE_OPTION: "full",
    }
    if case.shard_size < case.ranks:
        case = replace(case, shard_size=case.ranks)
        given |= {"--shard-size": str(case.ranks)}
        yield Alternative(given, case)
    for doublings in range(1, 7):
        ranks = case.ranks << doublings
        sharded = {**given, "--shard-size": str(ranks)} if "--shard-size" in given else given
        yield Alternative(sharded, replace(case, ranks=ranks, shard_size=ranks), more_ranks=True)
    if smaller := OPTIMIZERS[case.optimizer].smaller:
        yield Alternative({**given, "--optimizer": smaller}, replace(case, optimizer=smaller))
    if on_gpu and not case.offload:
        given = {**given, "--cpu-offload": "on"}
        case = replace(case, offload=True)
        yield Alternative(given, case)
    while case.seq_length >= 512:
        case = replace(case, seq_length=case.seq_length // 2)
        yield Alternative({**given, "-s": str(case.seq_length)}, case)
