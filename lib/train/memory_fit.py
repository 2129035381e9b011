"""Check that a run fits in memory, and choose the options that depend on memory.

lib/planning/memory_check.py makes the choice; this module applies it to the options and reports it.
It also lets all ranks use the same choice, and keeps an automatic batch small enough for the data.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from torch.distributed import ProcessGroup
from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.errors import UsageError
from lib.models import float8
from lib.optim.registry import OPTIMIZERS
from lib.parallel.degrees import RECOMPUTATIONS, Degrees
from lib.parallel.layout import ParallelLayout, gather
from lib.parallel.placement import list_cut_shapes
from lib.planning import capacity, sizes
from lib.planning.child_process import NoAnswer
from lib.planning.memory import USABLE
from lib.planning.memory_check import ENOUGH, FEW, MemoryCheck, choose_step
from lib.planning.trace import StepConfig
from lib.tokens.batches import Pass
from lib.train import plan
from lib.train.config import AUTO, EARLIER_LAUNCH, Config
from lib.train.inputs import Inputs

_STEPS = 10  # that an automatic batch leaves to a run, if the data and other options allow it
_GIB = 1 << 30
# From this number of nodes on, each has a replica of the model: the latency of a ring grows with
# its number of GPUs, and the network between nodes is slower than the links within one.
_NODES = 4
_GPUS_PER_NODE = 8  # of the machines that --plan-gpus stands for


def fit_here(config: Config, check: MemoryCheck, earlier_kind: str) -> Config:
    """Return the options with those that are open chosen for the memory of this rank.

    Ranks may choose different values; `agree_on_memory` takes what fits all of them. earlier_kind:
    the --activation-checkpointing of the earlier launch, below which a resumed run does not go, or
    "". Raises UsageError if no batch satisfies the other options. Whether the run fits at all is
    checked by `require_memory`.
    """
    config, notes = _choose(config, check, plan.launched_size(), _ranks_per_node(), earlier_kind)
    if log.rank() == 0:
        for note in notes:
            log.info(note)
    return config


def fit_planned(config: Config, inputs: Inputs, model: PreTrainedModel) -> dict[int, Config]:
    """Return the options for each number of --plan-gpus, chosen for the memory of such GPUs."""
    chosen = {}
    for ranks in config.plan_gpus or ():
        room = config.plan_gpu_memory * _GIB
        check = MemoryCheck(model, room, float("inf"), on_gpu=True)
        chosen[ranks], notes = _choose(config, check, ranks, _GPUS_PER_NODE, inputs.recomputed)
        for note in notes:
            log.info(f"on {units.counted(ranks, 'GPU')}, {note}")
    return chosen


def require_memory(config: Config, inputs: Inputs, check: MemoryCheck) -> None:
    """Raise UsageError, with the nearest setting that fits, if a run cannot fit on this rank.

    Every rank checks this alone, before there is a process group that could wait. With
    --plan-only-warn it is a warning.
    """
    error = _refusal(config, inputs, check)
    if error and not config.plan_only_warn:
        raise error
    if error and log.rank() == 0:
        log.warn(error.render().removeprefix("error: "))
    _report_copies(config, check)


def warn_of_memory(config: Config, inputs: Inputs, check: MemoryCheck) -> None:
    """Warn in a dry run that the run itself would be refused on this machine."""
    if config.plan_gpus:
        return
    if error := _refusal(config, inputs, check):
        log.warn("on this machine, " + error.render().removeprefix("error: "))
    _report_copies(config, check)


def step_config_here(
    config: Config, model: PreTrainedModel, most_documents: int | None = None
) -> StepConfig:
    """Return the step of this run on this rank's device; see plan.step_config."""
    return plan.step_config(
        config, model, plan.launched_size(), capacity.device().type == "cuda", most_documents
    )


def _refusal(config: Config, inputs: Inputs, check: MemoryCheck) -> UsageError | None:
    """Return the error for a run that does not fit on this rank, None if it fits."""
    step = step_config_here(config, check.model)
    if not (excess := check.excess(step)):
        return None
    global_batch = plan.divide(config, 0, plan.launched_size()).global_batch
    is_auto = "activation_checkpointing" in config.settled_by
    return check.refusal(step, excess, global_batch, begun=bool(inputs.begun), auto=is_auto)


def _report_copies(config: Config, check: MemoryCheck) -> None:
    """Log before the first save that host memory has no room for copies of a checkpoint."""
    step = step_config_here(config, check.model)
    copies = sizes.count_checkpoint(check.model, config.optimizer) / step.shard_size
    uses_host = step.offload or not check.on_gpu
    used = sum(check.states(step).values()) if uses_host else 0
    if config.ckpt_async and log.rank() == 0 and copies > USABLE * (check.host - used) >= 0:
        log.info(
            f"host memory: the copy of a checkpoint takes {units.memory(copies)} per rank, and "
            f"{units.memory(check.host - used)} are left: steps will wait while a checkpoint is "
            "written (--ckpt-async off does so from the beginning)"
        )


def agree_on_shards(config: Config, control: ProcessGroup) -> Degrees:
    """Return the degrees of parallelism of this run. All ranks must call this.

    If ranks have chosen different shard sizes, the largest is used, which fits all of them.
    """
    mine = plan.degrees(config)
    ranks = plan.launched_size()
    largest = max(gather(mine.shard or ranks, control))
    return mine._replace(shard=None if largest == ranks else largest)


def agree_on_memory(config: Config, samples: int | None, layout: ParallelLayout) -> Config:
    """Return the options that fit on every rank. All ranks must call this.

    These are the smallest batch, the most recomputation, and gathered weights only if all ranks
    keep them. samples: of an epoch, see `limit_batch`.
    """
    batches, kinds, gathered = zip(
        *gather(
            (config.batch_size, config.activation_checkpointing, bool(config.keep_gathered)),
            layout.control,
        ),
        strict=True,
    )
    most = max(kinds, key=RECOMPUTATIONS.index)
    if config.has_auto_batch:
        if log.rank() == 0 and min(batches) != config.batch_size:
            log.info(
                f"--batch-size auto: {min(batches)} per process instead of "
                f"{config.batch_size}, as rank {batches.index(min(batches))} has chosen"
            )
        config = config.with_values("memory plan", batch_size=min(batches))
    is_open = config.has_auto_batch or "activation_checkpointing" in config.settled_by
    if is_open and most != config.activation_checkpointing:
        if log.rank() == 0:
            log.info(
                f"--activation-checkpointing: {most} instead of "
                f"{config.activation_checkpointing}, as rank {kinds.index(most)} has chosen"
            )
        config = config.with_values("memory plan of another rank", activation_checkpointing=most)
    if "keep_gathered" in config.settled_by and not all(gathered):
        config = config.without_value("keep_gathered")
    if "shard_size" in config.settled_by and config.shard_size != layout.fsdp.size(-1):
        config = config.without_value("shard_size")
    return limit_batch(config, samples, layout.ranks)


def limit_batch(config: Config, samples: int | None, ranks: int) -> Config:
    """Return the options with a smaller automatic batch if the data would not fill enough steps.

    The fewer steps there are, the larger the share of the data that is dropped at their end. A
    typed --global-batch-size stays. samples: of an epoch, None if unknown.
    """
    epochs = plan.epochs(config)
    steps = min(config.step_limit or _STEPS, _STEPS)
    if not config.has_auto_batch or config.global_batch_size or samples is None or epochs is None:
        return config
    dp_size = plan.degrees(config).dp_size(ranks)
    most = epochs * samples // (steps * dp_size * (config.grad_accum_steps or 1))
    if config.batch_size <= most:
        return config
    tokens = Pass(config.batch_size, config.seq_length).tokens_per_device
    smaller = _candidates(config, ranks, tokens)
    batch = max([b for b in smaller if b <= most] or smaller[:1])
    if log.rank() == 0:
        log.info(
            f"--batch-size auto: {batch} per process instead of {config.batch_size}, so that "
            f"{units.counted(epochs * samples, 'sample')} make at least "
            f"{units.counted(steps, 'step')} or, if they are too few, as many as can be"
        )
    return config.with_values("samples of an epoch", batch_size=batch)


def suggest_batch(config: Config, check: MemoryCheck, has_begun: bool) -> None:
    """Warn on rank 0 if a micro-batch has too few tokens for a GPU, and name a batch that fits."""
    tokens = Pass(config.batch_size, config.seq_length).tokens_per_device
    if config.has_auto_batch or tokens >= FEW[check.on_gpu] or log.rank() != 0:
        return
    ranks = plan.launched_size()
    kept = config
    division = plan.divide(config, 0, ranks)
    whole = division.global_batch
    if has_begun or config.global_batch_size or config.grad_accum_steps:  # steps keep their samples
        kept = replace(config, global_batch_size=whole, grad_accum_steps=None)
    larger, _ = _choose(kept.with_values("", batch_size=AUTO), check, ranks, _ranks_per_node())
    batch = larger.batch_size
    if batch > config.batch_size:
        suggested = Pass(batch, config.seq_length).tokens_per_device
        step = (
            f" with --global-batch-size {whole}"
            if kept.global_batch_size
            else f", and makes a step of {batch * division.dp_size} samples instead of {whole}"
        )
        log.warn(
            f"{tokens:,} tokens in a pass leave a GPU waiting for its memory: --batch-size "
            f"{batch} fits by the memory plan ({suggested:,} tokens){step}; "
            "--batch-size auto takes what fits"
        )


def _choose(
    config: Config, check: MemoryCheck, ranks: int, per_node: int, kept: str = ""
) -> tuple[Config, list[str]]:
    """Return the options with those that are open chosen for the memory, and notes for the log.

    per_node: ranks of a node. kept: the least kind of activation checkpointing, or "".
    """
    kinds: Sequence[str] = [config.activation_checkpointing]
    if kinds == [AUTO]:
        kinds = RECOMPUTATIONS[RECOMPUTATIONS.index(kept) :] if kept else RECOMPUTATIONS
    batches = (
        _candidates(config, ranks, ENOUGH[check.on_gpu])
        if config.batch_size == AUTO
        else [config.batch_size]
    )
    rows = [
        [
            plan.step_config(
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
        case = _choose_step_config(
            config, check, rows, _replica_size(config, check, ranks, per_node)
        )
    except NoAnswer as error:
        case = rows[-1][0]  # the one with the least memory
        notes = [f"the memory of this run could not be estimated: {error}"]
    if config.activation_checkpointing == AUTO:
        config = config.with_values(
            EARLIER_LAUNCH if case.recompute == kept else "memory plan",
            activation_checkpointing=case.recompute,
        )
        if case.recompute != kinds[0]:
            notes += [
                f"--activation-checkpointing auto: {case.recompute}, since less recomputation "
                f"is not sure to fit in {units.memory(check.room)} by the memory plan"
            ]
    if case.shard_size != rows[0][0].shard_size:
        config = config.with_values("memory plan", shard_size=case.shard_size)
        notes.append(
            f"--shard-size {case.shard_size}: a replica of the model in each of "
            f"{ranks // case.shard_size} nodes, since a step fits so by the memory plan; "
            f"--shard-size {ranks} shards over all ranks"
        )
    if case.keep_gathered and not config.keep_gathered:
        config = config.with_values("memory plan", keep_gathered=True)
    if config.batch_size == AUTO:
        notes.append(_explain_batch(config, check, ranks, batches, case.batch))
        config = config.with_values("memory plan", batch_size=case.batch)
    return config, notes


def _choose_step_config(
    config: Config, check: MemoryCheck, rows: Sequence[Sequence[StepConfig]], node: int
) -> StepConfig:
    """Return the step to use, as `choose_step` does.

    Nothing is traced if no option is open, or if the largest step clearly fits. Raises NoAnswer if
    a trace fails.
    """
    most = rows[0][-1]
    gathers = config.keep_gathered is None and check.may_gather(most)
    wanted = replace(
        most, shard_size=node or most.shard_size, keep_gathered=most.keep_gathered or gathers
    )
    if check.is_easy(wanted) or [[wanted]] == rows:
        return wanted
    return check.in_child(choose_step, rows, node, gathers)


def _replica_size(config: Config, check: MemoryCheck, ranks: int, per_node: int) -> int:
    """Return the ranks of a node if they may form a replica of the model of their own, else 0."""
    block = OPTIMIZERS[config.optimizer].block
    is_open = config.shard_size is None and check.on_gpu and not config.cpu_offload
    if not is_open or per_node < 2 or ranks % per_node or ranks // per_node < _NODES:
        return 0
    return 0 if list_cut_shapes(check.model, per_node, block) else per_node


def _ranks_per_node() -> int:
    """Return the ranks of this launch on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _explain_batch(
    config: Config, check: MemoryCheck, ranks: int, batches: list[int], batch: int
) -> str:
    """Return the note about the batch that --batch-size auto has chosen."""
    enough = ENOUGH[check.on_gpu]
    whole = config.global_batch_size
    of_step = (
        f"divides the {units.counted(whole, 'sample')} of a step over "
        f"{units.counted(ranks, 'rank')} and "
        if whole
        else ""
    )
    per_pass = batch * plan.degrees(config).dp_size(ranks)
    if whole == per_pass:
        limit = "all that a rank has of a step"
    elif batch < batches[-1]:
        limit = f"the largest that {of_step}fits in {units.memory(check.room)} by the memory plan"
    else:
        limit = (
            f"the largest that {of_step}has at most {enough:,} tokens "
            "(larger ones are hardly faster)"
        )
    tokens = f"{Pass(batch, config.seq_length).tokens_per_device:,} tokens in a pass"
    return f"--batch-size auto: {batch} per process, {tokens}, {limit}"


def _candidates(config: Config, ranks: int, enough: int) -> list[int]:
    """Return the batch sizes that the other options allow, the smallest first.

    enough: tokens of the largest one; the smallest is returned even if it has more.
    """

    def tokens(batch: int) -> int:
        return Pass(batch, config.seq_length).tokens_per_device

    division = plan.divide(config, 0, ranks)
    share = division.global_batch // division.dp_size
    if config.global_batch_size:
        batches = [batch for batch in range(1, share + 1) if share % batch == 0]
    else:
        batches = [1 << power for power in range(enough.bit_length())]
    if config.precision == "fp8":
        batches = [batch for batch in batches if tokens(batch) % float8.MULTIPLE == 0]
    if not batches:
        raise UsageError(
            f"no --batch-size has tokens in multiples of {float8.MULTIPLE}, as "
            "--precision fp8 takes them",
            found=f"{config.seq_length:,} tokens per sample (--seq-length), "
            f"{share} samples per process and step",
        )
    return [batch for batch in batches if tokens(batch) <= enough] or batches[:1]
