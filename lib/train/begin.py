"""The start of a run on all ranks: process group, sharded model, weights or checkpoint."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from lib.checkpoints import commit, load
from lib.core import log, units
from lib.core.options import Options, resolved
from lib.core.paths import Experiment
from lib.models import architecture, identity
from lib.models.initialise import initialise, restore_buffers
from lib.models.shards import tie_again
from lib.models.weights import load_pretrained
from lib.tokens.encode import TOKENIZER_FILES
from lib.tokens.store import TokenStore
from lib.tokens.windows import Windows
from lib.train import distributed, flops, optimizer, plan, sharding, startup
from lib.train.distributed import World
from lib.train.journal import Journal
from lib.train.metrics import Metrics
from lib.train.optimizer import LossScale
from lib.train.plan import Plan
from lib.train.run import Run
from lib.train.signals import StopRequest
from lib.train.startup import Inputs, Limits
from lib.train.timers import Timers

_MODEL_FILES = ("config.json", "generation_config.json", "chat_template.jinja", *TOKENIZER_FILES)


def begin(opts: Options, experiment: Experiment, inputs: Inputs, limits: Limits,
          store: TokenStore) -> Run:
    """Return a run that stands at its first step, or where a checkpoint left off.

    All ranks must call this. Raises UsageError when the experiment's directory holds another run,
    ArtifactError when it has checkpoints and none of them is valid.
    """
    windows = {name: Windows(split.tokens, limits.seq_length)
               for name, split in store.splits.items()}
    world = distributed.start()
    run_plan = startup.make_plan(opts, inputs, limits, len(windows["train"]), world.rank)
    _claim(opts, experiment, run_plan, inputs, world)
    journal = Journal(experiment, world.rank)
    journal.config(resolved(opts), run_plan.identity(), inputs.model_dir)
    log.add_file(experiment.rank_log(world.rank))
    if world.rank == 0:
        _copy_model_files(inputs.model_dir, experiment.model)
        commit.clean(experiment.checkpoints)
    _print_head(opts, inputs, limits, run_plan, windows)

    model = architecture.build_on_meta(inputs.model_dir)
    flops_per_token = flops.per_token(model, limits.seq_length)
    log.info(f"sharded: {sharding.shard(model, world.mesh, limits.precision)}")
    model.to_empty(device=world.device)
    adamw = optimizer.adamw(model, opts.lr, (opts.beta1, opts.beta2), opts.weight_decay)
    loss_scale = LossScale(limits.precision)
    step = _resume(opts, experiment, run_plan, model, adamw, loss_scale, journal, world)
    if step is None:
        _first_weights(opts, inputs, model)
        torch.manual_seed(opts.seed + 1_000_003 * world.rank)  # dropout differs between ranks
        step = 0
        journal.event("start", 0, ranks=world.size)
    peak, where = flops.device_peak(world.device, limits.precision)
    log.info(f"peak for MFU: {peak / 1e12:.4g} TFLOP/s per rank ({where}); "
             f"{flops_per_token / 1e9:.4g} GFLOP per token")
    run = Run(opts, experiment, run_plan, world, model, adamw, loss_scale, windows["train"],
              windows.get("validation", Windows(windows["train"].tokens[:0], limits.seq_length)),
              Timers(world.device), StopRequest(world), journal,
              Metrics(experiment, world.rank, step), flops_per_token, peak, step)
    run.write_state("running")
    return run


def _claim(opts: Options, experiment: Experiment, run_plan: Plan, inputs: Inputs, world: World,
           ) -> None:
    """Check on every rank that the directory is ours to use; only then is anything written."""
    startup.require_free_name(opts, experiment, run_plan, inputs)
    dist.barrier(world.control)
    if world.rank == 0:
        if opts.overwrite and experiment.root.exists() and any(experiment.root.iterdir()):
            _set_aside(experiment)
        experiment.root.mkdir(parents=True, exist_ok=True)
    dist.barrier(world.control)


def _set_aside(experiment: Experiment) -> None:
    """Move an experiment that --overwrite replaces out of the way; it is never deleted."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = experiment.root.with_name(f"{experiment.root.name}.replaced-{stamp}")
    experiment.root.rename(aside)
    log.info(f"--overwrite: the earlier {experiment.root} is kept as {aside}")


def _copy_model_files(model_dir: Path, target: Path) -> None:
    """Keep config and tokenizer with the run, so that it stands alone."""
    target.mkdir(exist_ok=True)
    for name in _MODEL_FILES:
        if (model_dir / name).is_file() and not (target / name).is_file():
            shutil.copyfile(model_dir / name, target / name)


def _print_head(opts: Options, inputs: Inputs, limits: Limits, run_plan: Plan,
                windows: dict[str, Windows]) -> None:
    log.info(f"experiment {opts.save_dir / opts.experiment_name}")
    held_out = windows.get("validation")
    log.table({"model": inputs.model_dir, "dataset": inputs.source.path,
               "validation": f"{len(held_out):,} samples" if held_out is not None
               else "none (stage 02 makes one with --validation-percent)",
               **run_plan.describe()})
    if held_out is not None and len(held_out) == 0:
        log.warn("the validation split is shorter than one sample: no validation loss")


def _resume(opts: Options, experiment: Experiment, run_plan: Plan, model: nn.Module,
            adamw: torch.optim.Optimizer, loss_scale: LossScale, journal: Journal, world: World,
            ) -> int | None:
    """Load a checkpoint when there is one and return its step, else None."""
    if opts.resume in ("auto", "never"):
        checkpoint = load.newest_valid(
            experiment.checkpoints, world.control,
            lambda step, why: journal.event("quarantine", step, reason=why))
    else:
        checkpoint = load.verified(Path(opts.resume), world.control)
        if world.rank == 0:
            commit.supersede(experiment.checkpoints, checkpoint.step)
    if checkpoint is None:
        return None
    plan.require_same(checkpoint.commit()["identity"], run_plan.identity(), checkpoint.path)
    began = time.monotonic()
    tie_again(model)
    restore_buffers(model)
    state = load.load(checkpoint, model, adamw, world.device, world.control)
    loss_scale.restore(state["loss_scale"])
    journal.event("resume", checkpoint.step, path=str(checkpoint.path), ranks=world.size)
    log.info(f"resumed from {checkpoint.path} in {units.duration(time.monotonic() - began)}: step "
             f"{checkpoint.step:,} of {run_plan.total_steps:,}, {state['tokens']:,} tokens seen")
    if state["total_steps"] != run_plan.total_steps:
        log.info(f"the end moves from step {state['total_steps']:,} to {run_plan.total_steps:,}: "
                 "the learning-rate schedule is stretched over all of it")
    return checkpoint.step


def _first_weights(opts: Options, inputs: Inputs, model: nn.Module) -> None:
    began = time.monotonic()
    if opts.from_scratch or not identity.has_weights(inputs.model_dir):
        initialise(model, opts.seed)
    else:
        load_pretrained(model, inputs.model_dir)
    count = sum(p.numel() for p in model.parameters())
    log.info(f"weights: {units.count(count)} parameters {startup.weights_of(opts, inputs)} in "
             f"{units.duration(time.monotonic() - began)}")
