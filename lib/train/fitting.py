"""What fits: a run at all, `--batch-size auto`, and a batch that leaves a GPU waiting for memory.

The batch of a pass changes nothing that is learned as long as a step has the same samples. So it is
what fits by the memory plan, up to as many tokens as keep a device busy, and to what the data has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedModel

from lib.core import log, units
from lib.core.errors import UsageError
from lib.models import float8
from lib.parallel.layout import ParallelLayout, gather
from lib.planning import capacity, memory
from lib.planning.fit import Fit
from lib.planning.memory import USABLE, Estimates
from lib.planning.trace import Case
from lib.tokens import packing
from lib.train import plan
from lib.train.config import AUTO, Config
from lib.train.inputs import Inputs

_FEW = 1 << 13  # tokens in a pass, below which a GPU waits
_ENOUGH = {True: 1 << 15, False: 1 << 11}  # from here on more are hardly faster: on a GPU, a CPU
_STEPS = 10  # so many a run has at least, where the data and the other options allow it
_GIB = 1 << 30


def require(config: Config, inputs: Inputs, model: PreTrainedModel) -> None:
    """Raise UsageError, with the nearest setting that fits, when a run cannot fit on this rank.

    Every rank finds out for itself, before there is a process group that could wait.
    """
    if error := _refusal(config, inputs, model):
        raise error


def warn(config: Config, inputs: Inputs, model: PreTrainedModel) -> None:
    """Say in a dry run that the run itself would be refused on this machine."""
    if not config.plan_gpus and (error := _refusal(config, inputs, model)):
        log.warn("on this machine, " + error.render().removeprefix("error: "))


def case_here(config: Config, model: PreTrainedModel,
              most_documents: int = packing.FEWEST) -> Case:
    """Return what decides the memory of this run on this rank's device; see plan.memory_case."""
    device = capacity.device()
    return plan.memory_case(config, model, plan.launched_size(), device.type == "cuda",
                            capacity.total(device), most_documents)


def _refusal(config: Config, inputs: Inputs, model: PreTrainedModel) -> UsageError | None:
    fit = Fit.here(model, case_here(config, model), config.compile)
    if not (needed := fit.excess()):
        return None
    whole = plan.divide(config, 0, plan.launched_size()).global_batch
    return fit.refusal(needed, whole, has_begun=bool(inputs.begun))


def settle(config: Config, model: PreTrainedModel) -> Config:
    """Return the options with a number in the place of `auto`, for this rank's device.

    Ranks may find different ones: `agree` takes the smallest. Raises UsageError where no batch fits
    the other options; whether one fits in memory is asked later, as of any other.
    """
    if config.batch_size != AUTO or config.plan_gpus:
        return config
    device = capacity.device()
    on_gpu = device.type == "cuda"
    batch, why = memory.apart(_chosen, config, model, plan.launched_size(), on_gpu,
                              capacity.total(device), capacity.room(device))
    if log.rank() == 0:
        log.info(why)
    return config.settled("memory plan", batch_size=batch)


def agree(config: Config, samples: int | None, layout: ParallelLayout) -> Config:
    """Return the options with the smallest batch that any rank has found for its device.

    All ranks must call this. samples: of an epoch, see `limit`.
    """
    if not config.chose_batch:
        return config
    batch = min(gather(config.batch_size, layout.control))
    return limit(config.settled("memory plan", batch_size=batch), samples, layout.ranks)


def limit(config: Config, samples: int | None, ranks: int) -> Config:
    """Return the options with a smaller batch where it was open and the data would not fill steps.

    The fewer steps, the larger the share of the data that is left out at their end. samples: of an
    epoch; None: not known. A step whose samples are given is divided, not changed.
    """
    asked, steps = plan.epochs(config), min(config.step_limit or _STEPS, _STEPS)
    if not config.chose_batch or config.global_batch_size or samples is None or asked is None:
        return config
    dp_size = plan.degrees(config).dp_size(ranks)
    most = asked * samples // (steps * dp_size * (config.grad_accum_steps or 1))
    if config.batch_size <= most:
        return config
    smaller = _candidates(config, ranks, config.batch_size * config.seq_length)
    batch = max([b for b in smaller if b <= most] or smaller[:1])
    if log.rank() == 0:
        log.info(f"--batch-size auto: {batch} per process instead of {config.batch_size}, so that "
                 f"{units.counted(asked * samples, 'sample')} make at least "
                 f"{units.counted(steps, 'step')} or, if they are too few, as many as can be")
    return config.settled("samples of an epoch", batch_size=batch)


def planned(config: Config, model: PreTrainedModel) -> dict[int, Config]:
    """Return the options for each of --plan-gpus, with a batch for its memory where that is open.
    """
    asked = {}
    for ranks in config.plan_gpus or ():
        asked[ranks] = config
        if config.batch_size == AUTO:
            has = config.plan_gpu_memory * _GIB
            batch, why = memory.apart(_chosen, config, model, ranks, True, has, has)
            asked[ranks] = config.settled("memory plan", batch_size=batch)
            log.info(f"on {units.counted(ranks, 'GPU')}, {why}")
    return asked


def advise(config: Config, model: PreTrainedModel, has_begun: bool) -> None:
    """Say once that a pass has too few tokens for a GPU, and which batch fits; on rank 0."""
    device = capacity.device()
    on_gpu = device.type == "cuda"
    tokens = config.batch_size * config.seq_length
    if not on_gpu or config.chose_batch or tokens >= _FEW or log.rank() != 0:
        return
    ranks, kept = plan.launched_size(), config
    division = plan.divide(config, 0, ranks)
    whole = division.global_batch
    if has_begun or config.global_batch_size or config.grad_accum_steps:  # steps keep their samples
        kept = replace(config, global_batch_size=whole, grad_accum_steps=None)
    batch, _ = memory.apart(_chosen, kept, model, ranks, on_gpu, capacity.total(device),
                            capacity.room(device))
    if batch > config.batch_size:
        step = f" with --global-batch-size {whole}" if kept.global_batch_size else \
            f", and makes a step of {batch * division.dp_size} samples instead of {whole}"
        log.warn(f"{tokens:,} tokens in a pass leave a GPU waiting for its memory: --batch-size "
                 f"{batch} fits by the memory plan ({batch * config.seq_length:,} tokens){step}; "
                 "--batch-size auto takes what fits")


def _chosen(config: Config, model: PreTrainedModel, ranks: int, on_gpu: bool, has: float,
            room: float) -> tuple[int, str]:
    """Return the largest batch that fits a device and the other options, and why it is that.

    has: bytes of the device. room: those that the run can have.
    """
    candidates = _candidates(config, ranks, _ENOUGH[on_gpu])
    estimates: list[Estimates] = []

    def fits(batch: int) -> bool:
        given = replace(config, batch_size=batch)
        try:
            estimates[:] = estimates or [Estimates(model)]
            step = estimates[0].step(plan.memory_case(given, model, ranks, on_gpu, has))
        except Exception as error:  # a family that cannot be traced trains all the same
            log.info(f"memory could not be estimated: {type(error).__name__}")
            return False
        return step.total <= USABLE * room

    batch = _largest(candidates, fits)
    whole = config.global_batch_size
    of_step = f"divides the {units.counted(whole, 'sample')} of a step over " \
              f"{units.counted(ranks, 'rank')} and " if whole else ""
    per_pass = batch * plan.degrees(config).dp_size(ranks)
    limit = "all that a rank has of a step" if whole == per_pass else \
        f"the largest that {of_step}fits in {units.memory(room)} by the memory plan" \
        if batch < candidates[-1] else \
        f"the largest that {of_step}has no more than {_ENOUGH[on_gpu]:,} tokens, from which on " \
        "more are hardly faster"
    tokens = f"{batch * config.seq_length:,} tokens in a pass"
    return batch, f"--batch-size auto: {batch} per process, {tokens}, {limit}"


def _candidates(config: Config, ranks: int, enough: int) -> list[int]:
    """Return the batches that the other options allow, in order; the smallest whatever its size."""
    division = plan.divide(config, 0, ranks)
    share = division.global_batch // division.dp_size
    if config.global_batch_size:
        found = [batch for batch in range(1, share + 1) if share % batch == 0]
    else:
        found = [1 << power for power in range(enough.bit_length())]
    if config.precision == "fp8":
        found = [b for b in found if b * config.seq_length % float8.MULTIPLE == 0]
    if not found:
        raise UsageError(f"no --batch-size has tokens in multiples of {float8.MULTIPLE}, as "
                         "--precision fp8 takes them",
                         found=f"{config.seq_length:,} tokens per sample (--seq-length), "
                               f"{share} samples per process and step")
    return [b for b in found if b * config.seq_length <= enough] or found[:1]


def _largest(candidates: list[int], fits: Callable[[int], bool]) -> int:
    """Return the largest that fits, asking as seldom as can be; the smallest is not asked about."""
    if len(candidates) == 1 or fits(candidates[-1]):
        return candidates[-1]
    low, high = 0, len(candidates) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(candidates[middle]) else (low, middle)
    return candidates[low]
