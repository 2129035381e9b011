"""Check that a run fits in memory, and fill in the options left at `auto`.

`lib/planning/memory_check.py` makes the choice. This module applies it to the options, and reports
it. It also handles the limits of the data, and a batch that leaves a GPU waiting for its memory.
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
from lib.train.config import AUTO, Config
from lib.train.inputs import KEPT, Inputs, keep_global_batch

_STEPS = 10  # so many a run has at least, where the data and the other options allow it
_GIB = 1 << 30
# From so many nodes on, a replica of the model in each: rings of all GPUs have a latency that grows
# with their number, and the network between nodes is slower than the links within one.
_NODES = 4
_GPUS_PER_NODE = 8  # of the machines that --plan-gpus stands for


def default_batch(config: Config, inputs: Inputs) -> Config:
    """Return the options with a batch size where nobody typed one: `auto` on a GPU, else 1.

    A typed --global-batch-size leaves it at 1 on a GPU too. A run that goes on keeps the samples of
    a step, except with --resume-with-changes.
    """
    if config.batch_size is not None:
        return config
    is_typed = config.global_batch_size and "global_batch_size" not in config.settled_by
    on_gpu = bool(config.plan_gpus) or capacity.device().type == "cuda"
    if on_gpu and not is_typed and not config.prepare_only:
        config = replace(config, batch_size=AUTO)
        return config if config.resume_with_changes else keep_global_batch(config, inputs)
    config = replace(config, batch_size=1)
    if config.settled_by.get("global_batch_size") == KEPT:
        divided = plan.divide(config, 0, plan.launched_size())
        log.info(
            f"the {units.counted(divided.global_batch, 'sample')} of a step that the run was "
            f"begun with are kept: {plan.product(divided, config.seq_length or 1)}"
        )
    return config


def settle(config: Config, inputs: Inputs, model: PreTrainedModel) -> tuple[Config, MemoryCheck]:
    """Return the options with what fits this rank's device in the place of `auto`, and the rest.

    A run that goes on computes no less again than before, so that it goes on as it was. Ranks may
    find different values: `agree` takes what fits all of them. Raises UsageError where no batch
    goes with the other options; whether a run fits in memory at all is asked by `require`.
    """
    fit = MemoryCheck.here(model)
    if config.plan_gpus or config.prepare_only:
        return config, fit
    config, said = _chosen(config, fit, plan.launched_size(), _gpus_here(), inputs.recomputed)
    if log.rank() == 0:
        for line in said:
            log.info(line)
    return config, fit


def planned(config: Config, inputs: Inputs, model: PreTrainedModel) -> dict[int, Config]:
    """Return the options for each of --plan-gpus, with what fits its memory where that is open."""
    asked = {}
    for ranks in config.plan_gpus or ():
        has = config.plan_gpu_memory * _GIB
        fit = MemoryCheck(model, has, float("inf"), on_gpu=True)
        asked[ranks], said = _chosen(config, fit, ranks, _GPUS_PER_NODE, inputs.recomputed)
        for line in said:
            log.info(f"on {units.counted(ranks, 'GPU')}, {line}")
    return asked


def require(config: Config, inputs: Inputs, fit: MemoryCheck) -> None:
    """Raise UsageError, with the nearest setting that fits, when a run cannot fit on this rank.

    Every rank finds out for itself, before there is a process group that could wait. With
    --plan-only-warn it is told and the run begins.
    """
    error = _refusal(config, inputs, fit)
    if error and not config.plan_only_warn:
        raise error
    if error and log.rank() == 0:
        log.warn(error.render().removeprefix("error: "))
    _tell_copies(config, fit)


def warn(config: Config, inputs: Inputs, fit: MemoryCheck) -> None:
    """Say in a dry run that the run itself would be refused on this machine."""
    if config.plan_gpus:
        return
    if error := _refusal(config, inputs, fit):
        log.warn("on this machine, " + error.render().removeprefix("error: "))
    _tell_copies(config, fit)


def step_config_here(
    config: Config, model: PreTrainedModel, most_documents: int | None = None
) -> StepConfig:
    """Return what decides the memory of this run on this rank's device; see plan.step_config."""
    return plan.step_config(
        config, model, plan.launched_size(), capacity.device().type == "cuda", most_documents
    )


def _refusal(config: Config, inputs: Inputs, fit: MemoryCheck) -> UsageError | None:
    case = step_config_here(config, fit.model)
    if not (needed := fit.excess(case)):
        return None
    whole = plan.divide(config, 0, plan.launched_size()).global_batch
    return fit.refusal(
        case,
        needed,
        whole,
        begun=bool(inputs.begun),
        auto="activation_checkpointing" in config.settled_by,
    )


def _tell_copies(config: Config, fit: MemoryCheck) -> None:
    """Say ahead of the first save that host memory has no room for copies of what is saved.

    That is what is trained.
    """
    case = step_config_here(config, fit.model)
    copies = sizes.count_checkpoint(fit.model, config.optimizer) / case.shard_size
    are_states_here = case.offload or not fit.on_gpu
    taken = sum(fit.states(case).values()) if are_states_here else 0
    if config.ckpt_async and log.rank() == 0 and copies > USABLE * (fit.host - taken) >= 0:
        log.info(
            f"host memory: a copy of what a checkpoint holds takes {units.memory(copies)} per "
            f"rank, of {units.memory(fit.host - taken)} that are left: steps will wait while "
            "a checkpoint is written (--ckpt-async off does so from the beginning)"
        )


def agree_on_shards(config: Config, control: ProcessGroup) -> Degrees:
    """Return over how many ranks this run divides what; all ranks must call this.

    Where ranks have chosen different numbers for a replica, it is the largest, which fits them all.
    """
    mine = plan.degrees(config)
    ranks = plan.launched_size()
    largest = max(gather(mine.shard or ranks, control))
    return mine._replace(shard=None if largest == ranks else largest)


def agree(config: Config, samples: int | None, layout: ParallelLayout) -> Config:
    """Return the options that fit every rank: of all that were chosen, those with least memory.

    That is the smallest batch, the most recomputation, and weights that do not stay gathered. All
    ranks must call this. samples: of an epoch, see `limit`.
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
    return limit(config, samples, layout.ranks)


def limit(config: Config, samples: int | None, ranks: int) -> Config:
    """Return the options with a smaller batch where it was open and the data would not fill steps.

    The fewer steps, the larger the share of the data that is left out at their end. samples: of an
    epoch; None: not known. A step whose samples are given is divided, not changed.
    """
    asked = plan.epochs(config)
    steps = min(config.step_limit or _STEPS, _STEPS)
    if not config.has_auto_batch or config.global_batch_size or samples is None or asked is None:
        return config
    dp_size = plan.degrees(config).dp_size(ranks)
    most = asked * samples // (steps * dp_size * (config.grad_accum_steps or 1))
    if config.batch_size <= most:
        return config
    tokens = Pass(config.batch_size, config.seq_length).tokens_per_device
    smaller = _candidates(config, ranks, tokens)
    batch = max([b for b in smaller if b <= most] or smaller[:1])
    if log.rank() == 0:
        log.info(
            f"--batch-size auto: {batch} per process instead of {config.batch_size}, so that "
            f"{units.counted(asked * samples, 'sample')} make at least "
            f"{units.counted(steps, 'step')} or, if they are too few, as many as can be"
        )
    return config.with_values("samples of an epoch", batch_size=batch)


def advise(config: Config, fit: MemoryCheck, has_begun: bool) -> None:
    """Say once that a pass has too few tokens for a GPU, and which batch fits; on rank 0."""
    tokens = Pass(config.batch_size, config.seq_length).tokens_per_device
    if config.has_auto_batch or tokens >= FEW[fit.on_gpu] or log.rank() != 0:
        return
    ranks = plan.launched_size()
    kept = config
    division = plan.divide(config, 0, ranks)
    whole = division.global_batch
    if has_begun or config.global_batch_size or config.grad_accum_steps:  # steps keep their samples
        kept = replace(config, global_batch_size=whole, grad_accum_steps=None)
    larger, _ = _chosen(kept.with_values("", batch_size=AUTO), fit, ranks, _gpus_here())
    batch = larger.batch_size
    if batch > config.batch_size:
        fitting = Pass(batch, config.seq_length).tokens_per_device
        step = (
            f" with --global-batch-size {whole}"
            if kept.global_batch_size
            else f", and makes a step of {batch * division.dp_size} samples instead of {whole}"
        )
        log.warn(
            f"{tokens:,} tokens in a pass leave a GPU waiting for its memory: --batch-size "
            f"{batch} fits by the memory plan ({fitting:,} tokens){step}; "
            "--batch-size auto takes what fits"
        )


def _chosen(
    config: Config, fit: MemoryCheck, ranks: int, per_node: int, kept: str = ""
) -> tuple[Config, list[str]]:
    """Return the options with what fits in the place of `auto`, and why it is that.

    per_node: ranks of a node. kept: how much is computed again at least.
    """
    kinds: Sequence[str] = [config.activation_checkpointing]
    if kinds == [AUTO]:
        kinds = RECOMPUTATIONS[RECOMPUTATIONS.index(kept) :] if kept else RECOMPUTATIONS
    batches = (
        _candidates(config, ranks, ENOUGH[fit.on_gpu])
        if config.batch_size == AUTO
        else [config.batch_size]
    )
    rows = [
        [
            plan.step_config(
                replace(config, batch_size=batch, activation_checkpointing=kind),
                fit.model,
                ranks,
                fit.on_gpu,
            )
            for batch in batches
        ]
        for kind in kinds
    ]
    said: list[str] = []
    try:
        case = _choose(config, fit, rows, _node(config, fit, ranks, per_node))
    except NoAnswer as error:
        case = rows[-1][0]  # what takes the least
        said = [f"the memory that this run takes could not be estimated: {error}"]
    if config.activation_checkpointing == AUTO:
        config = config.with_values(
            "earlier launch" if case.recompute == kept else "memory plan",
            activation_checkpointing=case.recompute,
        )
        if case.recompute != kinds[0]:
            said += [
                f"--activation-checkpointing auto: {case.recompute}, since less recomputation "
                f"is not sure to fit in {units.memory(fit.room)} by the memory plan"
            ]
    if case.shard_size != rows[0][0].shard_size:
        config = config.with_values("memory plan", shard_size=case.shard_size)
        said.append(
            f"--shard-size {case.shard_size}: a replica of the model in each of "
            f"{ranks // case.shard_size} nodes, since a step fits so by the memory plan; "
            f"--shard-size {ranks} shards over all ranks"
        )
    if case.keep_gathered and not config.keep_gathered:
        config = config.with_values("memory plan", keep_gathered=True)
    if config.batch_size == AUTO:
        said.append(_why(config, fit, ranks, batches, case.batch))
        config = config.with_values("memory plan", batch_size=case.batch)
    return config, said


def _choose(
    config: Config, fit: MemoryCheck, rows: Sequence[Sequence[StepConfig]], node: int
) -> StepConfig:
    """Return the case to take, see choose_step. Raises NoAnswer if a trace that it needs fails.

    Traces are made where something is open, and does not fit beyond doubt.
    """
    most = rows[0][-1]
    gathers = config.keep_gathered is None and fit.may_gather(most)
    wanted = replace(
        most, shard_size=node or most.shard_size, keep_gathered=most.keep_gathered or gathers
    )
    if fit.is_easy(wanted) or [[wanted]] == rows:
        return wanted
    return fit.in_child(choose_step, rows, node, gathers)


def _node(config: Config, fit: MemoryCheck, ranks: int, per_node: int) -> int:
    """Return the ranks of a node if they may share a replica of the model, else 0."""
    block = OPTIMIZERS[config.optimizer].block
    is_open = config.shard_size is None and fit.on_gpu and not config.cpu_offload
    if not is_open or per_node < 2 or ranks % per_node or ranks // per_node < _NODES:
        return 0
    return 0 if list_cut_shapes(fit.model, per_node, block) else per_node


def _gpus_here() -> int:
    """Return the ranks that this launch has on each node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _why(config: Config, fit: MemoryCheck, ranks: int, batches: list[int], batch: int) -> str:
    """Say why --batch-size auto is that batch."""
    enough = ENOUGH[fit.on_gpu]
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
        limit = f"the largest that {of_step}fits in {units.memory(fit.room)} by the memory plan"
    else:
        limit = (
            f"the largest that {of_step}has at most {enough:,} tokens "
            "(larger ones are hardly faster)"
        )
    tokens = f"{Pass(batch, config.seq_length).tokens_per_device:,} tokens in a pass"
    return f"--batch-size auto: {batch} per process, {tokens}, {limit}"


def _candidates(config: Config, ranks: int, enough: int) -> list[int]:
    """Return the batches that the other options allow, in order; the smallest whatever its size."""

    def tokens(batch: int) -> int:
        return Pass(batch, config.seq_length).tokens_per_device

    division = plan.divide(config, 0, ranks)
    share = division.global_batch // division.dp_size
    if config.global_batch_size:
        found = [batch for batch in range(1, share + 1) if share % batch == 0]
    else:
        found = [1 << power for power in range(enough.bit_length())]
    if config.precision == "fp8":
        found = [b for b in found if tokens(b) % float8.MULTIPLE == 0]
    if not found:
        raise UsageError(
            f"no --batch-size has tokens in multiples of {float8.MULTIPLE}, as "
            "--precision fp8 takes them",
            found=f"{config.seq_length:,} tokens per sample (--seq-length), "
            f"{share} samples per process and step",
        )
    return [b for b in found if tokens(b) <= enough] or found[:1]
