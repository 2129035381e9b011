"""What an error of torch or NCCL most likely means, and which knob to turn first."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from lib.core import commands, launcher, log
from lib.core.errors import StageError, UsageError
from lib.core.paths import Experiment
from lib.parallel import meeting, recompute
from lib.train import earlier, journal, meters
from lib.train.config import Config
from lib.train.plan import launched_size

_MORE = "docs/how-to/troubleshooting.md says more"


@contextmanager
def explained(config: Config, experiment: Experiment) -> Iterator[None]:
    """Replace an error by one that says what to do, where that is known."""
    try:
        yield
    except BaseException as error:
        if (known := explanation(error, config, experiment)) is not None:
            raise known from error
        raise


def explanation(error: BaseException, config: Config, experiment: Experiment) -> StageError | None:
    """Return what to do about an error, None for one that explains itself or is a bug."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return _out_of_memory(text, config, experiment)
    if "does not have a deterministic implementation" in text:
        return UsageError(
            "--deterministic on cannot train this model",
            found=text.splitlines()[0],
            expected="operations that give the same bits each time",
            run=commands.as_typed("--deterministic", "off"),
        )
    if isinstance(error, dist.DistError) or re.search(r"Connection (closed|reset) by peer", text):
        return meeting.without_launcher() if launcher.is_gone() else _lost_rank(text)
    return None


def require_finite(loss: float, step: int, config: Config) -> None:
    """Raise UsageError when the first loss is NaN or infinite.

    What follows could not be better: the weights stay as they are in such a step.
    """
    if step == 1 and not math.isfinite(loss):
        how = (
            "--precision bf16 or fp32: the values overflow float16"
            if config.precision == "fp16"
            else "whole weights (03_download_model.py --verify), or --from-scratch to draw others"
        )
        raise UsageError(
            f"the loss of the first step is {loss}",
            expected=how,
            found="no step was taken yet, so it comes from the weights or from the "
            f"precision, not from the learning rate; {_MORE}",
        )


def diverged(
    step: int, in_a_row: int, rollbacks: int, config: Config, experiment: Experiment
) -> UsageError:
    """Return the error of a run that no earlier checkpoint has helped or can help."""
    tried = (
        f", after {rollbacks} rollbacks"
        if rollbacks
        else ", and there is no checkpoint from before"
    )
    return UsageError(
        f"training has diverged: {in_a_row} bad steps in a row{tried}",
        found=f"nothing was learned since step {step - in_a_row}",
        hint=f"a lower learning rate, under another name; {_MORE}",
        run=_calmer(config, experiment),
    )


def _calmer(config: Config, experiment: Experiment) -> str:
    """Return the command that goes on from the newest whole checkpoint at a tenth of the rate."""
    name = f"{experiment.root.name}-lower-lr"
    rates = ["-e", name, "--lr", f"{config.lr / 10:g}", "--min-lr", f"{config.min_lr / 10:g}"]
    dropped = ["--overwrite", "--resume"]
    if (checkpoint := earlier.newest(experiment)) is None:
        return commands.as_typed(*rates, drop=dropped)
    end = journal.read_state(experiment).get("total_steps") or config.step_limit
    return commands.as_typed(
        *rates,
        "--resume",
        checkpoint.path,
        "--resume-with-changes",
        *(["--max-steps", end] if end else []),
        drop=dropped,
    )


def _out_of_memory(text: str, config: Config, experiment: Experiment) -> UsageError:
    if torch.cuda.is_available():
        path = experiment.profile / f"rank_{log.rank():05d}.out_of_memory.pickle"
        with suppress(Exception):  # the message matters more
            meters.snapshot(path)
            log.info(f"allocator snapshot for pytorch.org/memory_viz: {path}")
    knobs = []
    now = config.activation_checkpointing
    kinds = recompute.KINDS
    if more := kinds[kinds.index(now) + 1 :] if now in kinds else kinds[1:]:
        knobs.append(f"--activation-checkpointing {more[0]}")
    if (config.batch_size or 1) > 1:
        knobs.append("a smaller --batch-size with --global-batch-size as it is")
    knobs += ["a smaller --seq-length", "more ranks to shard over"]
    if not config.cpu_offload and torch.cuda.is_available():
        knobs.append("--cpu-offload on")
    return UsageError(
        "out of memory",
        found=text.splitlines()[0],
        expected=f"in this order: {'; '.join(knobs)} ({_MORE})",
        run=commands.as_typed("--dry-run", "--plan-gpus", launched_size()),
    )


def _lost_rank(text: str) -> StageError:
    timed_out = "timeout" in text.lower() or "timed out" in text.lower()
    problem = (
        "a collective timed out: some rank stopped, or the network between nodes does not work"
        if timed_out
        else "the connection to another rank broke: it failed first"
    )
    return StageError(
        problem,
        found=text.splitlines()[0][:300],
        expected="the cause in that rank's log (logs/rank_*.log, the one that ends first)",
        hint=_MORE,
        run=commands.as_typed(),
    )
