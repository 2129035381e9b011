"""Define the choices of parallelism and recomputation, for options, without importing torch."""

from __future__ import annotations

from typing import NamedTuple

from lib.core import units
from lib.core.errors import UsageError

# The kinds of activation checkpointing: recompute nothing, cheap operations, or a whole block from
# its input. Each needs less memory and more time than the one before.
RECOMPUTATIONS = ("none", "selective", "full")
# The ways in which ranks that share a row compute attention, see lib/parallel/context.py.
ULYSSES = "ulysses"
ALLGATHER = "allgather"


def list_more_recomputation(kind: str) -> tuple[str, ...]:
    """Return the kinds of recomputation that need less memory. kind: `auto` counts as none."""
    now = RECOMPUTATIONS.index(kind) if kind in RECOMPUTATIONS else 0
    return RECOMPUTATIONS[now + 1 :]


class Degrees(NamedTuple):
    """The degrees of parallelism.

    shard: ranks that share a replica of the model, None for all ranks. context: ranks that share a
    row of tokens; they are neighbours and read the same samples. method: how they do.
    """

    shard: int | None = None
    context: int = 1
    method: str = ULYSSES

    def replicas(self, ranks: int) -> int:
        """Return the number of replicas of the model on the ranks of a launch.

        Raises UsageError if the ranks cannot be divided by these degrees.
        """
        shard = self.shard or ranks
        product = f"ranks = replicas × {shard} (--shard-size)"
        if ranks % self.context:
            divisors = [str(degree) for degree in range(1, ranks + 1) if ranks % degree == 0]
            raise UsageError(
                f"--context-parallel {self.context} does not divide the "
                f"{units.counted(ranks, 'rank')}",
                expected=f"--context-parallel {', '.join(divisors)}",
                hint="torchrun --nproc-per-node N starts N ranks; --dry-run --plan-gpus N plans "
                "for N GPUs on any machine",
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
