"""Define the choices of parallelism and recomputation, for options, without importing torch."""

from __future__ import annotations

from typing import NamedTuple

from lib.core import units
from lib.core.errors import UsageError

# The kinds of activation checkpointing: recompute nothing, cheap operations, or a whole block from
# its input. Each needs less memory and more time than the one before.
RECOMPUTATIONS = ("none", "selective", "full")


def list_more_recomputation(kind: str) -> tuple[str, ...]:
    """Return the kinds of recomputation that need less memory. kind: `auto` counts as none."""
    now = RECOMPUTATIONS.index(kind) if kind in RECOMPUTATIONS else 0
    return RECOMPUTATIONS[now + 1 :]


class Degrees(NamedTuple):
    """The degrees of parallelism. Only `shard` may be more than 1 so far.

    shard: ranks that share a replica of the model, None for all ranks. context: ranks that share a
    sequence; they are neighbours and read the same samples. experts: ranks of a replica that share
    the experts of a layer.
    """

    shard: int | None = None
    context: int = 1
    experts: int = 1

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas of the model on the ranks of a launch.

        Raises UsageError if the ranks cannot be divided by these degrees.
        """
        shard = self.shard or ranks
        product = f"ranks = replicas × {shard} (--shard-size)"
        if max(self.context, self.experts) > 1:
            raise UsageError(
                "context parallelism and expert parallelism are not supported",
                found=f"{product}, sequences over {self.context} and experts over "
                f"{self.experts} of these",
                expected="both over 1 rank",
            )
        if ranks % shard:
            raise UsageError(
                f"--shard-size {shard} does not divide the {units.counted(ranks, 'rank')}",
                found=product,
                expected="replicas of equal size",
            )
        return ranks // shard

    def dp_rank(self, rank: int) -> int:
        """Return the index of a rank among the ranks that read different samples."""
        return rank // self.context

    def dp_size(self, ranks: int) -> int:
        """Return the number of ranks of a launch that read different samples."""
        return ranks // self.context
