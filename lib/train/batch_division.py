"""Divide the global batch by the ranks, without importing torch, since launchers check it first."""

from __future__ import annotations

from lib.core.errors import Problems, UsageError
from lib.core.options import AUTO
from lib.parallel.degrees import Degrees
from lib.tokens.order import Division
from lib.train.config import Config


def get_degrees(config: Config) -> Degrees:
    """Return the degrees of parallelism that the options ask for."""
    return Degrees(config.shard_size, config.context_parallel, config.context_parallel_method)


def divide_batch(config: Config, rank: int, ranks: int) -> Division:
    """Return the division of a global batch into micro-batches; UsageError if there is none.

    rank: the rank that trains on this share of the batch. ranks: number of ranks, of this launch or
    of a planned one. A --batch-size that is still open counts as 1.
    """
    batch = get_micro_batch(config)
    degrees = get_degrees(config)
    dp_rank = degrees.dp_rank(rank)
    dp_size = degrees.dp_size(ranks)
    if config.global_batch_size is None:
        return Division(batch, config.grad_accum_steps or 1, dp_rank, dp_size)
    per_pass = batch * dp_size
    accumulation, rest = divmod(config.global_batch_size, per_pass)
    if rest or not accumulation:
        raise UsageError(
            f"--global-batch-size {config.global_batch_size} cannot be divided",
            expected=f"a multiple of {per_pass} = {batch} per process "
            f"(--batch-size) × {dp_size} ranks",
        )
    return Division(batch, accumulation, dp_rank, dp_size)


def find_batch_size(config: Config, ranks: int) -> int:
    """Return the largest --batch-size up to that of `config` that divides its global batch.

    Returns 0 if there is none, or if `config` has no --global-batch-size.
    """
    samples = config.global_batch_size or 0
    dp_size = get_degrees(config).dp_size(ranks)
    sizes = range(get_micro_batch(config), 0, -1)
    return next((size for size in sizes if samples and samples % (size * dp_size) == 0), 0)


def require_divisible(config: Config, ranks: int) -> None:
    """Raise UsageError if the batch or --shard-size cannot be divided by this number of ranks."""
    problems = Problems()
    problems.collect(lambda: divide_batch(config, 0, ranks))
    problems.collect(lambda: get_degrees(config).replicas(ranks))
    problems.raise_if_any()


def get_micro_batch(config: Config) -> int:
    """Return the samples in a micro-batch of one process; 1 while --batch-size is open."""
    return 1 if config.batch_size in (None, AUTO) else config.batch_size
