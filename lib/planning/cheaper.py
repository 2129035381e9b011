"""Other settings of a step that need less memory, the least costly first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from lib.parallel import recompute
from lib.planning.trace import Case

RECOMPUTE_OPTION = "--activation-checkpointing"
GATHER_OPTION = "--keep-gathered"


class Turn(NamedTuple):
    """Names another setting. options: to give instead, in the order in which people turn them."""

    options: dict[str, str]
    case: Case
    more_ranks: bool = False

    def words(self, without: str = "") -> list[str]:
        """Return the options as words of a command, but for one that need not be given."""
        return [word for option in self.options.items() if option[0] != without for word in option]


def turned(asked: Case, on_gpu: bool = True) -> Iterator[Turn]:
    """Yield other settings, the least costly first."""
    off = {GATHER_OPTION: "off"} if asked.keep_gathered else {}
    if off:
        asked = replace(asked, keep_gathered=False)
        yield Turn(off, asked)
    for kind in recompute.KINDS[recompute.KINDS.index(asked.recompute) + 1 :]:
        yield Turn({**off, RECOMPUTE_OPTION: kind}, replace(asked, recompute=kind))
    case = replace(asked, recompute="full")
    for batch in reversed(range(1, asked.batch)):
        if asked.batch % batch == 0:  # so that a global batch is still divided evenly
            case = replace(case, batch=batch, accumulates=True)
            yield Turn({**off, "-b": str(batch), RECOMPUTE_OPTION: "full"}, case)
    given = {
        **off,
        **({"-b": str(case.batch)} if asked.batch > 1 else {}),
        RECOMPUTE_OPTION: "full",
    }
    if case.shard_size < case.ranks:
        case = replace(case, shard_size=case.ranks)
        given |= {"--shard-size": str(case.ranks)}
        yield Turn(given, case)
    for doublings in range(1, 7):
        ranks = case.ranks << doublings
        whole = {**given, "--shard-size": str(ranks)} if "--shard-size" in given else given
        yield Turn(whole, replace(case, ranks=ranks, shard_size=ranks), more_ranks=True)
    if case.optimizer == "adamw":
        yield Turn({**given, "--optimizer": "adamw8bit"}, replace(case, optimizer="adamw8bit"))
    if on_gpu and not case.offload:
        given = {**given, "--cpu-offload": "on"}
        case = replace(case, offload=True)
        yield Turn(given, case)
    while case.seq_length >= 512:
        case = replace(case, seq_length=case.seq_length // 2)
        yield Turn({**given, "-s": str(case.seq_length)}, case)
