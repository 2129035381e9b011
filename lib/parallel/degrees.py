"""Over how many ranks a run divides what; asked before torch is imported."""

from __future__ import annotations

from typing import NamedTuple

from lib.core import units
from lib.core.errors import UsageError


class Degrees(NamedTuple):
    """Says over how many ranks each thing is divided; only `shard` may be more than 1 so far.

    shard: a replica of the model; None: as many as there are. context: a sequence; its ranks are
    neighbours and read the same samples. experts: those of a layer, among the ranks of a replica.
    """

    shard: int | None = None
    context: int = 1
    experts: int = 1

    def replicas(self, ranks: int) -> int:
        """Return how many replicas of the model the ranks of a launch hold.

        Raises UsageError, with the product, where they cannot be divided like this.
        """
        shard = self.shard or ranks
        product = f"ranks = replicas × {shard} (--shard-size)"
        if max(self.context, self.experts) > 1:
            raise UsageError(
                "neither a sequence nor the experts of a layer can be divided yet",
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
        """Return which of the readers of samples a rank is."""
        return rank // self.context

    def dp_size(self, ranks: int) -> int:
        """Return how many readers of samples there are among the ranks of a launch."""
        return ranks // self.context
