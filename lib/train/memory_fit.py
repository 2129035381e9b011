"""Check that a run fits in memory, and fill in the options that depend on memory.

These are --batch-size, --activation-checkpointing and --shard-size, and whether weights stay
gathered throughout a step.
lib/planning/memory_check.py estimates which values fit and chooses among them. This module writes
the choice into the options, logs it, and makes all ranks use the same one. It also keeps an
automatic batch small enough for the data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.errors import UsageError
from lib.core.options import AUTO
from lib.models import float8
from lib.models.options import FLOAT8_RECIPES
from lib.optim.optimizers import OPTIMIZERS
from lib.parallel.degrees import RECOMPUTATIONS, Degrees
from lib.parallel.layout import ParallelLayout, gather
from lib.parallel.placement import list_cut_shapes
from lib.planning import capacity, sizes
from lib.planning.child_process import NoAnswer
from lib.planning.memory import USABLE
from lib.planning.memory_check import ENOUGH, FEW, MemoryCheck, choose_step
from lib.planning.trace import StepConfig
from lib.train import batch_division, plan
from lib.train.config import EARLIER_LAUNCH, Config
from lib.train.inputs import Inputs

_MIN_STEPS = 10  # an automatic batch is smaller if the run would have fewer steps
_GIB = 1 << 30
# From this number of nodes on, each has its own replica of the model: the latency of a ring grows
# with its number of GPUs, and the network between nodes is slower than the links within one.
_MIN_NODES_FOR_REPLICAS = 4
_GPUS_PER_NODE = 8  # assumed for --plan-gpus


def fit_to_this_rank(config: Config, check: MemoryCheck, earlier_kind: str) -> Config:
    """Fill in the open options that depend on memory, for the memory of this rank.

    Ranks may choose different values; `agree_on_memory` then takes values that fit on all ranks.
    earlier_kind: the --activation-checkpointing of the earlier launch, or "". A resumed run does
    not recompute less than before. Raises UsageError if the other options allow no batch;
    `require_memory` checks whether the run fits at all.
    """
    config, notes = _fill_options(
        config, check, plan.get_world_size(), _ranks_per_node(), earlier_kind
    )
    if log.rank() == 0:
        for note in notes:
            log.detail(note)
    return config


def fit_to_planned_gpus(
    config: Config, inputs: Inputs, model: PreTrainedModel
) -> dict[int, Config]:
    """Fill in the open options for the GPUs of --plan-gpus; return them by number of GPUs."""
    by_ranks: dict[int, Config] = {}
    if not config.plan_gpus:
        return by_ranks
    room = config.plan_gpus.gib * _GIB
    for ranks in config.plan_gpus.counts:
        check = MemoryCheck(model, room, float("inf"), on_gpu=True)
        by_ranks[ranks], notes = _fill_options(
            config, check, ranks, _GPUS_PER_NODE, inputs.recomputed
        )
        step = plan.make_step_config(by_ranks[ranks], model, ranks, on_gpu=True)
        notes += _describe_offloaded(check, step, min(ranks, _GPUS_PER_NODE))
        for note in notes:
            log.info(f"on {units.counted(ranks, 'GPU')}, {note}")
    return by_ranks


def require_memory(config: Config, inputs: Inputs, check: MemoryCheck) -> None:
    """Raise UsageError, with the nearest setting that fits, if a run cannot fit on this rank.

    Each rank checks this by itself, before the process group exists. With --plan-only-warn, only
    warns.
    """
    error = _explain_excess(config, inputs, check)
    if error and not config.plan_only_warn:
        raise error
    if error and log.rank() == 0:
        log.warn(error.render().removeprefix("error: "))
    _report_offloaded(config, check)
    _report_copies(config, check)


def warn_of_memory(config: Config, inputs: Inputs, check: MemoryCheck) -> None:
    """Warn in a dry run that the run itself would not fit in this machine's memory."""
    if config.plan_gpus:
        return
    if error := _explain_excess(config, inputs, check):
        log.warn("on this machine, " + error.render().removeprefix("error: "))
    _report_offloaded(config, check)
    _report_copies(config, check)


def make_local_step_config(
    config: Config, model: PreTrainedModel, most_documents: int | None = None
) -> StepConfig:
    """Return the step of this run on the device of this rank; see plan.make_step_config."""
    return plan.make_step_config(
        config, model, plan.get_world_size(), capacity.get_device().type == "cuda", most_documents
    )


def _explain_excess(config: Config, inputs: Inputs, check: MemoryCheck) -> UsageError | None:
    """Return the error for a run that does not fit on this rank, None if it fits."""
    step = make_local_step_config(config, check.model)
    if not (excess := check.excess(step)):
        return None
    global_batch = batch_division.divide_batch(config, 0, plan.get_world_size()).global_batch
    is_auto = "activation_checkpointing" in config.settled_by
    has_begun = bool(inputs.earlier_run)
    return check.refusal(step, excess, global_batch, has_begun=has_begun, auto=is_auto)


def _describe_offloaded(check: MemoryCheck, step: StepConfig, ranks_per_node: int) -> list[str]:
    """Return a line about the host memory of activations, or nothing if there are none."""
    if not (size := check.count_offloaded(step)):
        return []
    return [
        f"--activation-offload on: {units.memory(size)} of page-locked host memory per rank, "
        f"{units.memory(size * ranks_per_node)} per node"
    ]


def _report_offloaded(config: Config, check: MemoryCheck) -> None:
    """Log on rank 0 how much host memory the activations of this run take."""
    if log.rank() == 0:
        step = make_local_step_config(config, check.model)
        for line in _describe_offloaded(check, step, _ranks_per_node()):
            log.info(line)


def _report_copies(config: Config, check: MemoryCheck) -> None:
    """Log if host memory has no room for the copies from which checkpoints are written."""
    step = make_local_step_config(config, check.model)
    copies = sizes.count_checkpoint(check.model, step.optimizer) / step.shard_size
    uses_host = step.offload or not check.on_gpu
    used = sum(check.count_states(step).values()) if uses_host else 0
    used += check.count_offloaded(step)
    if config.ckpt_async and log.rank() == 0 and copies > USABLE * (check.host - used) >= 0:
        log.info(
            f"host memory: the copy of a checkpoint takes {units.memory(copies)} per rank, and "
            f"{units.memory(check.host - used)} are left: steps will wait while a checkpoint is "
            "written (--ckpt-async off does so from the beginning)"
        )


def agree_on_shards(config: Config, control: ProcessGroup) -> Degrees:
    """Return the degrees of parallelism that all ranks use. All ranks must call this.

    If ranks have chosen different shard sizes, the largest one is used, because it fits on all.
    """
    degrees = batch_division.get_degrees(config)
    ranks = plan.get_world_size()
    largest = max(gather(degrees.shard or ranks, control))
    return degrees._replace(shard=None if largest == ranks else largest)


def agree_on_memory(config: Config, samples: int | None, layout: ParallelLayout) -> Config:
    """Return options that fit on every rank. All ranks must call this.

    Ranks may have chosen different values. All of them then use the smallest batch and the most
    recomputation, and keep weights gathered only if every rank has chosen that. samples: see
    `limit_batch`.
    """
    batches, kinds, gathered = zip(
        *gather(
            (config.batch_size, config.activation_checkpointing, config.keep_gathered),
            layout.control,
        ),
        strict=True,
    )
    smallest = min(batches)
    most = max(kinds, key=RECOMPUTATIONS.index)
    if config.has_auto_batch:
        if log.rank() == 0 and smallest != config.batch_size:
            log.detail(
                f"--batch-size auto: {smallest} per process instead of "
                f"{config.batch_size}, as rank {batches.index(smallest)} has chosen"
            )
        config = config.with_values("memory estimate", batch_size=smallest)
    is_open = config.has_auto_batch or "activation_checkpointing" in config.settled_by
    if is_open and most != config.activation_checkpointing:
        if log.rank() == 0:
            log.detail(
                f"--activation-checkpointing: {most} instead of "
                f"{config.activation_checkpointing}, as rank {kinds.index(most)} has chosen"
            )
        config = config.with_values(
            "memory estimate of another rank", activation_checkpointing=most
        )
    config = replace(config, keep_gathered=all(gathered))
    if "shard_size" in config.settled_by and config.shard_size != layout.fsdp.size(-1):
        config = config.without_value("shard_size")
    return limit_batch(config, samples, layout.ranks)


def limit_batch(config: Config, samples: int | None, ranks: int) -> Config:
    """Return the options, with a smaller automatic batch if the run would have too few steps.

    A run drops the samples at its end that do not fill a step. With few steps, they would be a
    large part of the data. A typed --global-batch-size stays as it is. samples: number of samples
    in an epoch, None if unknown.
    """
    epochs = plan.count_epochs(config)
    steps = min(config.step_limit or _MIN_STEPS, _MIN_STEPS)
    if not config.has_auto_batch or config.global_batch_size or samples is None or epochs is None:
        return config
    dp_size = batch_division.get_degrees(config).dp_size(ranks)
    most = epochs * samples // (steps * dp_size * (config.grad_accum_steps or 1))
    if config.batch_size <= most:
        return config
    tokens = plan.get_pass(config, config.batch_size).tokens_per_device
    candidates = _list_batches(config, ranks, tokens)
    batch = max([size for size in candidates if size <= most] or candidates[:1])
    if log.rank() == 0:
        log.detail(
            f"--batch-size auto: {batch} per process instead of {config.batch_size}, so that "
            f"{units.counted(epochs * samples, 'sample')} make at least "
            f"{units.counted(steps, 'step')} or, if they are too few, as many as can be"
        )
    return config.with_values("samples of an epoch", batch_size=batch)


def suggest_batch(config: Config, check: MemoryCheck, has_begun: bool) -> None:
    """Warn on rank 0 if a micro-batch has too few tokens for a GPU; suggest a batch that fits.

    has_begun: the run has checkpoints, so the suggestion must keep its global batch.
    """
    tokens = plan.get_pass(config, config.batch_size).tokens_per_device
    if config.has_auto_batch or tokens >= FEW[check.on_gpu] or log.rank() != 0:
        return
    ranks = plan.get_world_size()
    division = batch_division.divide_batch(config, 0, ranks)
    global_batch = division.global_batch
    keeps_global_batch = bool(has_begun or config.global_batch_size or config.grad_accum_steps)
    open_config = config.with_values("", batch_size=AUTO)
    if keeps_global_batch:
        open_config = replace(open_config, global_batch_size=global_batch, grad_accum_steps=None)
    larger, _ = _fill_options(open_config, check, ranks, _ranks_per_node())
    batch = larger.batch_size
    if batch > config.batch_size:
        suggested = plan.get_pass(config, batch).tokens_per_device
        step = (
            f" with --global-batch-size {global_batch}"
            if keeps_global_batch
            else f", and makes a step of {batch * division.dp_size} samples instead of "
            f"{global_batch}"
        )
        log.warn(
            f"a micro-batch of {tokens:,} tokens is too small: the GPU waits for its memory. "
            f"--batch-size {batch} fits by the memory estimate ({suggested:,} tokens){step}; "
            "--batch-size auto takes what fits"
        )


def _fill_options(
    config: Config, check: MemoryCheck, ranks: int, ranks_per_node: int, earlier_kind: str = ""
) -> tuple[Config, list[str]]:
    """Return the options, with open ones filled in for the memory, and lines for the log.

    earlier_kind: see `fit_to_this_rank`.
    """
    kinds: Sequence[str] = [config.activation_checkpointing]
    if kinds == [AUTO]:
        first = RECOMPUTATIONS.index(earlier_kind) if earlier_kind else 0
        kinds = RECOMPUTATIONS[first:]
    batches = (
        _list_batches(config, ranks, ENOUGH[check.on_gpu])
        if config.batch_size == AUTO
        else [config.batch_size]
    )
    rows = [
        [
            plan.make_step_config(
                replace(config, batch_size=batch, activation_checkpointing=kind),
                check.model,
                ranks,
                check.on_gpu,
            )
            for batch in batches
        ]
        for kind in kinds
    ]
    notes: list[str] = []
    try:
        step = _choose_step_config(
            config, check, rows, _choose_replica_size(config, check, ranks, ranks_per_node)
        )
    except NoAnswer as error:
        step = rows[-1][0]  # the one that needs the least memory
        notes = [f"the memory of this run could not be estimated: {error}"]
    if config.activation_checkpointing == AUTO:
        config = config.with_values(
            EARLIER_LAUNCH if step.recompute == earlier_kind else "memory estimate",
            activation_checkpointing=step.recompute,
        )
        if step.recompute != kinds[0]:
            notes += [
                f"--activation-checkpointing auto: {step.recompute}, since less recomputation "
                f"is not sure to fit in {units.memory(check.room)} by the memory estimate"
            ]
    if step.shard_size != rows[0][0].shard_size:
        config = config.with_values("memory estimate", shard_size=step.shard_size)
        notes.append(
            f"--shard-size {step.shard_size}: a replica of the model in each of "
            f"{ranks // step.shard_size} nodes, since a step fits so by the memory estimate; "
            f"--shard-size {ranks} shards over all ranks"
        )
    config = replace(config, keep_gathered=step.keep_gathered)
    if config.batch_size == AUTO:
        notes.append(_explain_batch(config, check, ranks, batches, step.batch))
        config = config.with_values("memory estimate", batch_size=step.batch)
    return config, notes


def _choose_step_config(
    config: Config, check: MemoryCheck, rows: Sequence[Sequence[StepConfig]], replica_size: int
) -> StepConfig:
    """Return the fastest step that fits, as `choose_step` does.

    Traces no step if no option is open or if the largest step clearly fits. rows: the steps to
    choose from. Each row has more recomputation than the row before; within a row, batches grow.
    replica_size: see `_choose_replica_size`. Raises NoAnswer if a trace fails.
    """
    largest = rows[0][-1]
    may_gather = check.may_gather(largest)
    fastest = replace(
        largest,
        shard_size=replica_size or largest.shard_size,
        keep_gathered=largest.keep_gathered or may_gather,
    )
    if check.is_easy(fastest) or [[fastest]] == rows:
        return fastest
    return check.in_child(choose_step, rows, replica_size, may_gather)


def _choose_replica_size(
    config: Config, check: MemoryCheck, ranks: int, ranks_per_node: int
) -> int:
    """Return the number of ranks of a node if each node may hold a replica, else 0."""
    is_open = config.shard_size is None and check.on_gpu and not config.cpu_offload
    context = batch_division.get_degrees(config).context
    if not is_open or ranks_per_node < 2 or ranks % ranks_per_node or ranks_per_node % context:
        return 0
    block = OPTIMIZERS[config.optimizer].block
    has_enough_nodes = ranks // ranks_per_node >= _MIN_NODES_FOR_REPLICAS
    if has_enough_nodes and not list_cut_shapes(check.model, ranks_per_node, block):
        return ranks_per_node
    return 0


def _ranks_per_node() -> int:
    """Return the number of ranks of this launch on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _explain_batch(
    config: Config, check: MemoryCheck, ranks: int, batches: list[int], batch: int
) -> str:
    """Return the line of the log about the batch that --batch-size auto has chosen."""
    global_batch = config.global_batch_size
    divides_step = (
        f"divides the {units.counted(global_batch, 'sample')} of a step over "
        f"{units.counted(ranks, 'rank')} and "
        if global_batch
        else ""
    )
    samples_per_pass = batch * batch_division.get_degrees(config).dp_size(ranks)
    if global_batch == samples_per_pass:
        reason = "all that a rank has of a step"
    elif batch < batches[-1]:
        reason = (
            f"the largest that {divides_step}fits in {units.memory(check.room)} "
            "by the memory estimate"
        )
    else:
        reason = (
            f"the largest that {divides_step}has at most {ENOUGH[check.on_gpu]:,} tokens "
            "(larger ones are hardly faster)"
        )
    tokens = f"{plan.get_pass(config, batch).tokens_per_device:,} tokens in a micro-batch"
    return f"--batch-size auto: {batch} per process, {tokens}, {reason}"


def _list_batches(config: Config, ranks: int, max_tokens: int) -> list[int]:
    """Return the batch sizes per process that the other options allow, smallest first.

    max_tokens: the most tokens in a batch; the smallest batch may have more. Raises
    UsageError if --precision fp8 allows none.
    """

    def count_tokens(batch: int) -> int:
        return plan.get_pass(config, batch).tokens_per_device

    division = batch_division.divide_batch(config, 0, ranks)
    share = division.global_batch // division.dp_size
    if config.global_batch_size:
        batches = [batch for batch in range(1, share + 1) if share % batch == 0]
    else:
        batches = [1 << power for power in range(max_tokens.bit_length())]
    if config.precision in FLOAT8_RECIPES:
        batches = [batch for batch in batches if count_tokens(batch) % float8.MULTIPLE == 0]
    if not batches:
        raise UsageError(
            f"no --batch-size has tokens in multiples of {float8.MULTIPLE}, as "
            "--precision fp8 takes them",
            found=f"{config.seq_length:,} tokens per sample (--seq-length), "
            f"{share} samples per process and step",
        )
    return [batch for batch in batches if count_tokens(batch) <= max_tokens] or batches[:1]
