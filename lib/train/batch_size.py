"""`--batch-size auto`, and what is said of a batch that leaves a GPU waiting for memory.

The batch of a pass changes nothing that is learned as long as a step has the same samples. So it is
what fits by the memory plan, up to as many tokens as keep a device busy, and to what the data has.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable

import torch

from lib.core import log, units
from lib.core.errors import UsageError
from lib.core.options import Options
from lib.models import float8
from lib.parallel.layout import World, gather
from lib.train import memory, memory_plan, plan
from lib.train.memory_plan import USABLE, Estimates
from lib.train.startup import Setting

_FEW = 1 << 13  # tokens in a pass, below which a GPU waits
_ENOUGH = {True: 1 << 15, False: 1 << 11}  # from here on more are hardly faster: on a GPU, a CPU
_STEPS = 10  # so many a run has at least, where the data and the other options allow it
_GIB = 1 << 30


def settle(opts: Options, setting: Setting) -> None:
    """Put a number in the place of `auto`, for this rank's device, and say why it is that.

    Ranks may find different ones: `agree` takes the smallest. Raises UsageError where no batch fits
    the other options; whether one fits in memory is asked later, as of any other.
    """
    if opts.batch_size != plan.AUTO or opts.plan_gpus:
        return
    on_gpu, device = _device()
    opts.batch_size, why = memory_plan.apart(_chosen, opts, setting, plan.launched_size(), on_gpu,
                                   memory.total(device), memory.room(device))
    if log.rank() == 0:
        log.info(why)


def agree(opts: Options, setting: Setting, samples: int | None, world: World) -> None:
    """Take the smallest batch that any rank has found for its device; all ranks must call this.

    samples: of an epoch, see `limit`.
    """
    if setting.auto_batch:
        opts.batch_size = min(gather(opts.batch_size, world.control))
        limit(opts, setting, samples, world.size)


def limit(opts: Options, setting: Setting, samples: int | None, ranks: int) -> None:
    """Take a smaller batch where that was open and the data would not fill the steps, and say so.

    The fewer steps, the larger the share of the data that is left out at their end. samples: of an
    epoch; None: not known. A step whose samples are given is divided, not changed.
    """
    asked, steps = plan.epochs(opts), min(opts.max_steps or _STEPS, _STEPS)
    if not setting.auto_batch or opts.global_batch_size or samples is None or asked is None:
        return
    most = asked * samples // (steps * ranks * (opts.grad_accum_steps or 1))
    if opts.batch_size <= most:
        return
    smaller = _candidates(opts, setting, ranks, opts.batch_size * setting.seq_length)
    before, opts.batch_size = opts.batch_size, max([b for b in smaller if b <= most] or smaller[:1])
    if log.rank() == 0:
        log.info(f"--batch-size auto: {opts.batch_size} per process instead of {before}, so that "
                 f"{units.counted(asked * samples, 'sample')} make "
                 f"{units.counted(steps, 'step')} or, if they are too few, as many as can be")


def planned(opts: Options, setting: Setting) -> dict[int, Options]:
    """Return the options for each of --plan-gpus, with a batch for its memory where that is open.
    """
    asked = {}
    for ranks in opts.plan_gpus or ():
        asked[ranks] = copy.copy(opts)
        if opts.batch_size == plan.AUTO:
            has = opts.plan_gpu_memory * _GIB
            asked[ranks].batch_size, why = memory_plan.apart(_chosen, opts, setting, ranks, True,
                                                             has, has)
            log.info(f"on {units.counted(ranks, 'GPU')}, {why}")
    return asked


def advise(opts: Options, setting: Setting, has_begun: bool) -> None:
    """Say once that a pass has too few tokens for a GPU, and which batch fits; on rank 0."""
    on_gpu, device = _device()
    tokens = opts.batch_size * setting.seq_length
    if not on_gpu or setting.auto_batch or tokens >= _FEW or log.rank() != 0:
        return
    ranks, kept = plan.launched_size(), copy.copy(opts)
    whole = plan.divide(opts, 0, ranks).global_batch
    if has_begun or opts.global_batch_size or opts.grad_accum_steps:  # steps keep their samples
        kept.global_batch_size, kept.grad_accum_steps = whole, None
    batch, _ = memory_plan.apart(_chosen, kept, setting, ranks, on_gpu, memory.total(device),
                                 memory.room(device))
    if batch > opts.batch_size:
        step = f" with --global-batch-size {whole}" if kept.global_batch_size else \
            f", and makes a step of {batch * ranks} samples instead of {whole}"
        log.warn(f"{tokens:,} tokens in a pass leave a GPU waiting for its memory: --batch-size "
                 f"{batch} fits by the memory plan ({batch * setting.seq_length:,} tokens){step}; "
                 "--batch-size auto takes what fits")


def _device() -> tuple[bool, torch.device]:
    on_gpu, local_rank = torch.cuda.is_available(), int(os.environ.get("LOCAL_RANK", "0"))
    return on_gpu, torch.device("cuda", local_rank % torch.cuda.device_count()) if on_gpu \
        else torch.device("cpu")


def _chosen(opts: Options, setting: Setting, ranks: int, on_gpu: bool, has: float, room: float,
            ) -> tuple[int, str]:
    """Return the largest batch that fits a device and the other options, and why it is that.

    has: bytes of the device. room: those that the run can have.
    """
    candidates = _candidates(opts, setting, ranks, _ENOUGH[on_gpu])
    estimates: list[Estimates] = []

    def fits(batch: int) -> bool:
        given = copy.copy(opts)
        given.batch_size = batch
        try:
            estimates[:] = estimates or [Estimates(setting.model)]
            step = estimates[0].step(memory_plan.case_of(given, setting, ranks, on_gpu, has))
        except Exception as error:  # a family that cannot be traced trains all the same
            log.info(f"memory could not be estimated: {type(error).__name__}")
            return False
        return step.total <= USABLE * room

    batch = _largest(candidates, fits)
    whole = opts.global_batch_size
    of_step = f"divides the {units.counted(whole, 'sample')} of a step over " \
              f"{units.counted(ranks, 'rank')} and " if whole else ""
    limit = "all that a rank has of a step" if whole == batch * ranks else \
        f"the largest that {of_step}fits in {units.memory(room)} by the memory plan" \
        if batch < candidates[-1] else \
        f"the largest that {of_step}has no more than {_ENOUGH[on_gpu]:,} tokens, from which on " \
        "more are hardly faster"
    tokens = f"{batch * setting.seq_length:,} tokens in a pass"
    return batch, f"--batch-size auto: {batch} per process, {tokens}, {limit}"


def _candidates(opts: Options, setting: Setting, ranks: int, enough: int) -> list[int]:
    """Return the batches that the other options allow, in order; the smallest whatever its size."""
    if opts.global_batch_size:
        share = plan.divide(opts, 0, ranks).global_batch // ranks
        found = [batch for batch in range(1, share + 1) if share % batch == 0]
    else:
        found = [1 << power for power in range(enough.bit_length())]
    if setting.precision == "fp8":
        found = [b for b in found if b * setting.seq_length % float8.MULTIPLE == 0]
    if not found:
        raise UsageError(f"no --batch-size has tokens in multiples of {float8.MULTIPLE}, as "
                         "--precision fp8 takes them",
                         found=f"{setting.seq_length:,} tokens per sample (--seq-length), "
                               f"{opts.global_batch_size // ranks} samples per process and step")
    return [b for b in found if b * setting.seq_length <= enough] or found[:1]


def _largest(candidates: list[int], fits: Callable[[int], bool]) -> int:
    """Return the largest that fits, asking as seldom as can be; the smallest is not asked about."""
    if len(candidates) == 1 or fits(candidates[-1]):
        return candidates[-1]
    low, high = 0, len(candidates) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(candidates[middle]) else (low, middle)
    return candidates[low]
