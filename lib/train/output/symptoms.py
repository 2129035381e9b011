"""Replace errors of torch and NCCL by errors that say what to do, and describe a diverged run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist

from lib.checkpoints import commit
from lib.core import commands, launcher, log
from lib.core.errors import StageError, UsageError
from lib.core.paths import Experiment
from lib.parallel import meeting
from lib.planning.knobs import list_remedies
from lib.runs.run_records import read_state
from lib.train.config import Config
from lib.train.output import meters
from lib.train.plan import get_world_size, make_step_without_attention

_SEE_PAGE = "docs/how-to/troubleshooting.md says more"


@contextmanager
def explain_errors(config: Config, experiment: Experiment) -> Iterator[None]:
    """Replace an error that is raised in the block by one that says what to do, if known."""
    try:
        yield
    except BaseException as error:
        if (explained := explain_error(error, config, experiment)) is not None:
            raise explained from error
        raise


def explain_error(
    error: BaseException, config: Config, experiment: Experiment
) -> StageError | None:
    """Return an error that says what to do, None for an error that is clear or is a bug."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in text:
        return _make_memory_error(text, config, experiment)
    if "does not have a deterministic implementation" in text:
        return UsageError(
            "--deterministic on cannot train this model",
            found=text.splitlines()[0],
            expected="operations with a deterministic implementation",
            run=commands.as_typed("--deterministic", "off"),
        )
    if isinstance(error, dist.DistError) or re.search(r"Connection (closed|reset) by peer", text):
        return meeting.launcher_error() if launcher.is_gone() else _make_lost_rank_error(text)
    return None


def require_finite(loss: float, step: int, config: Config) -> None:
    """Raise UsageError if the loss of the first step is NaN or infinite.

    Such a step leaves the weights unchanged, so no later step could be better.
    """
    if step == 1 and not math.isfinite(loss):
        remedy = "intact weights (03_download_model.py --verify), or --from-scratch for new ones"
        if config.precision == "fp16":
            remedy = "--precision bf16 or fp32: the values overflow float16"
        raise UsageError(
            f"the loss of the first step is {loss}",
            expected=remedy,
            found="no step was taken before, so the weights or the precision are the cause, "
            f"not the learning rate; {_SEE_PAGE}",
        )


def make_divergence_error(
    step: int, in_a_row: int, rollbacks: int, config: Config, experiment: Experiment
) -> UsageError:
    """Return the error for a run that cannot be rolled back, or was rolled back too often.

    step: the last of the bad steps. in_a_row: the number of consecutive bad steps.
    """
    tried = (
        f", after {rollbacks} rollbacks"
        if rollbacks
        else ", and there is no checkpoint before them"
    )
    return UsageError(
        f"training has diverged: {in_a_row} bad steps in a row{tried}",
        found=f"the weights have not changed since step {step - in_a_row}",
        hint=f"a lower learning rate, under another experiment name; {_SEE_PAGE}",
        run=_format_lower_rate_command(config, experiment),
    )


def _format_lower_rate_command(config: Config, experiment: Experiment) -> str:
    """Return the command that continues from the newest complete checkpoint at a tenth of --lr."""
    name = f"{experiment.root.name}-lower-lr"
    rates = ["-e", name, "--lr", f"{config.lr / 10:g}", "--min-lr", f"{config.min_lr / 10:g}"]
    dropped = ["--overwrite", "--resume"]
    if (checkpoint := commit.find_newest(experiment.checkpoints)) is None:
        return commands.as_typed(*rates, drop=dropped)
    end = read_state(experiment.state).get("total_steps") or config.step_limit
    return commands.as_typed(
        *rates,
        "--resume",
        checkpoint.path,
        "--resume-with-changes",
        *(["--max-steps", end] if end else []),
        drop=dropped,
    )


def _make_memory_error(text: str, config: Config, experiment: Experiment) -> UsageError:
    """Return the error for a failed allocation. On CUDA, write a snapshot of the allocator."""
    if torch.cuda.is_available():
        path = experiment.profile / f"rank_{log.rank():05d}.out_of_memory.pickle"
        with suppress(Exception):  # the failed allocation must be reported
            meters.write_snapshot(path)
            log.info(f"allocator snapshot for pytorch.org/memory_viz: {path}")
    step = make_step_without_attention(config, get_world_size(), torch.cuda.is_available())
    return UsageError(
        "out of memory",
        found=text.splitlines()[0],
        hint="\n".join([f"try these settings in this order ({_SEE_PAGE}):", *list_remedies(step)]),
        run=commands.as_typed("--dry-run", "--plan-gpus", get_world_size()),
    )


def _make_lost_rank_error(text: str) -> StageError:
    """Return the error for a connection to another rank that broke. text: the error of torch."""
    timed_out = "timeout" in text.lower() or "timed out" in text.lower()
    problem = (
        "a collective timed out: a rank has stopped, or the network between nodes fails"
        if timed_out
        else "the connection to another rank broke, because that rank failed first"
    )
    return StageError(
        problem,
        found=text.splitlines()[0][:300],
        expected="the cause in that rank's log (the file logs/rank_*.log that ends first)",
        hint=_SEE_PAGE,
        run=commands.as_typed(),
    )
