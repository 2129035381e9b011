"""The start of a run on all ranks: process group, sharded model, weights or checkpoint."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from lib.checkpoints.hyperpod import HyperPodTier
from lib.checkpoints.local import LocalTier
from lib.checkpoints.tier import Tier
from lib.core import log, units
from lib.core.declared import Role
from lib.core.errors import UsageError
from lib.core.identity import differences
from lib.core.paths import Experiment
from lib.models import adapters, float8
from lib.models.sharded import Placement
from lib.models.weights import initialise, load_pretrained
from lib.optim import registry
from lib.optim.guard import StepGuard
from lib.parallel import (
    attention,
    attention_kernel,
    compiling,
    determinism,
    flight_recorder,
    loss,
    parallelize,
)
from lib.parallel.compiling import Compiler
from lib.parallel.layout import ParallelLayout, gather
from lib.parallel.meeting import Meeting
from lib.planning import capacity
from lib.planning.estimate import MemoryEstimate
from lib.train import (
    checks,
    fitting,
    flops,
    launches,
    model_files,
    outlook,
    resume,
    startup,
    watchdog,
)
from lib.train import experiment as experiments
from lib.train.config import Config
from lib.train.journal import Journal, read_config
from lib.train.outlook import Hardware, Work
from lib.train.plan import Plan, degrees
from lib.train.profiling import Profiler
from lib.train.report import Report
from lib.train.run import Run
from lib.train.saving import Saves
from lib.train.signals import StopRequest
from lib.train.startup import Data, Inputs
from lib.train.timers import Timers
from lib.train.watchdog import Watchdog


def begin(config: Config, experiment: Experiment, inputs: Inputs, model: PreTrainedModel,
          data: Data, meeting: Meeting | None = None) -> Run:
    """Return a run that stands at its first step, or where a checkpoint left off.

    meeting: see layout.meet. All ranks must call this. Raises ExperimentHeld, UsageError for ranks
    that were not started alike, ArtifactError when no checkpoint of the run is valid.
    """
    estimate = MemoryEstimate(model, config.precision) if log.rank() == 0 else None
    if config.deterministic:
        determinism.require()
    layout = ParallelLayout.start(degrees(config), meeting,
                                  watchdog.longest(config.watchdog_minutes))
    config = fitting.agree(config, data.samples, layout)
    if estimate is not None:
        estimate.begin(fitting.case_here(config, model, data.most_documents))
    config, launch = launches.join(config, experiment, layout)
    run_plan = startup.make_plan(config, inputs, data.samples, layout.rank)
    checks.require_room(config, run_plan.total_steps, has_begun=bool(inputs.begun))
    journal = Journal(experiment, layout.rank)
    _require_agreement(config, run_plan, layout)
    lease = experiments.claim(config, experiment, run_plan, inputs, journal, launch, layout)
    tier = _tier(config, read_config(experiment)["run"], layout, journal)
    log.add_file(experiment.rank_log(layout.rank))
    work = startup.work_of(config, inputs, model)
    peak, where = flops.device_peak(layout.device, config.precision)
    _print_head(config, inputs, run_plan, data, work, Hardware(
        layout.ranks, peak, where, "GPU" if layout.device.type == "cuda" else "rank"))
    if config.deterministic:
        log.info(f"deterministic: {determinism.measure_cost(layout.device, config.precision)}")
    compiler = compiling.make_compiler(config.compile, layout.device)
    before = capacity.usage(layout.device)["memory/current_gib"]
    offload = _shard(config, model, layout, compiler)
    adamw = registry.build(config.optimizer, model, config.lr, (config.beta1, config.beta2),
                           config.weight_decay, compiler and compiler.wrap)
    log.info(f"peak for MFU: {peak / 1e12:.4g} TFLOP/s per rank ({where}); "
             + flops.described(model, config.seq_length))
    run = Run(config, experiment, run_plan, layout, model, adamw,
              StepGuard(config.precision, config.spike_factor,
                        torch.device("cpu") if offload else layout.device, layout.ranks),
              data, data.stream(config.seed, config.seq_length, run_plan.division, layout.device),
              Timers(layout.device),
              StopRequest(layout, experiment.stop_file, config.max_minutes),
              Profiler(config.profile, experiment.profile, layout.rank, layout.device), journal,
              work.flops, peak, estimate, before, lease)
    run.saves = Saves(config, experiment, journal, layout.saving, tier)
    run.model_files = experiments.digests(experiment.model) if layout.rank == 0 else {}
    if not resume.resume(run, inputs.named):
        _first_weights(config, inputs, model, layout)
        journal.event("start", 0, ranks=layout.ranks)
    float8.rescale_with(adamw, model)
    _settle_attention(config, model, layout)
    log.info(f"loss: {loss.chunk(model, layout, compiler)}")
    run.report = Report(config, experiment, run_plan, layout.rank, run.step,
                        f"{experiment.root.name}: {model.config.model_type}, {layout.ranks} × "
                        f"{layout.device.type}")
    run.watchdog = _watchdog(config, experiment.rank_log(layout.rank))
    run.write_state("running")
    run.tell_estimate()
    _collect_together()
    return run


def _settle_attention(config: Config, model: PreTrainedModel, layout: ParallelLayout) -> None:
    """Decide how the model attends, and say so; UsageError where packed documents cannot train."""
    attention.ask_no_device(model, config.packing, config.seq_length)
    log.info("attention: " + attention_kernel.settle(model, config.packing,
                                                     config.precision, layout.device))
    if config.packing == "documents":
        loss.require_isolation(model, layout)


def _watchdog(config: Config, rank_log: Path) -> Watchdog:
    return Watchdog(config.watchdog_minutes, rank_log.with_suffix(".stacks.txt"),
                    lambda: flight_recorder.dump(rank_log.with_suffix(".collectives.json")))


def _collect_together() -> None:
    """From now on all ranks collect garbage in the same steps, see Run.step_done.

    Left alone, each would stop the others in turn. What there is now is never looked at again.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


def _shard(config: Config, model: PreTrainedModel, layout: ParallelLayout,
           compiler: Compiler | None) -> bool:
    """Shard the model and give it memory, without content; tell whether that is the host's."""
    offload = config.cpu_offload and layout.device.type == "cuda"
    asked = {"float8": {"recipe": config.fp8_recipe}} if config.precision == "fp8" else {}
    placement = Placement(layout.fsdp.size(-1), offload, layout.device.type)
    for said in adapters.adapt(model, adapters.make(asked), placement).said:
        log.info(said)
    small = not offload and parallelize.may_stay_gathered(model, capacity.total(layout.device))
    log.info("sharded: " + parallelize.parallelize(
        model, layout.fsdp, config.precision, config.activation_checkpointing, compiler, offload,
        small))
    parallelize.materialise(model, layout.device, offload)
    return offload


def _tier(config: Config, run: str, layout: ParallelLayout, journal: Journal) -> Tier | None:
    """Return where frequent checkpoints go, if anywhere; run: the mark of this run."""
    if config.ckpt_hyperpod:
        return HyperPodTier(config.ckpt_hyperpod, config.experiment_name, run, layout.control,
                            layout.saving, journal.event)
    if config.ckpt_local_dir:
        return LocalTier(config.ckpt_local_dir / f"{config.experiment_name}-{run}", layout.control,
                         layout.saving, journal.event)
    return None


def _require_agreement(config: Config, run_plan: Plan, layout: ParallelLayout) -> None:
    """Raise UsageError when a rank was started with other data or options; all ranks call this.

    A difference would train on a mixture, or hang the first time one rank saves alone.
    """
    mine = run_plan.identity()
    mine["options"] |= config.having(Role.ALIKE) | {
        "ckpt_local_dir": bool(config.ckpt_local_dir),
        "steps": run_plan.total_steps, "batch_size": run_plan.division.micro_batch}
    mine["inputs"] = mine["inputs"] | {"samples": run_plan.samples}
    for rank, other in enumerate(gather(mine, layout.control)):
        if found := differences(other, mine):
            raise UsageError(f"ranks {rank} and {layout.rank} were not started alike",
                             found="\n".join(each.told(f"on rank {rank}", f"on rank {layout.rank}")
                                             for each in found),
                             expected="the same command, dataset and model on every node")


def _print_head(config: Config, inputs: Inputs, run_plan: Plan, data: Data, work: Work,
                hardware: Hardware) -> None:
    log.info(f"experiment {config.save_dir / config.experiment_name}")
    held_out = " + ".join(f"{len(part.samples):,}" for part in data.held_out)
    no_split = "none with --streaming" if data.samples is None else \
        "none that fills a sample (stage 02 makes a split with --validation-percent)"
    log.table({"model": startup.model_of(config, inputs), "dataset": startup.dataset_of(inputs),
               "validation": f"{held_out} samples" if held_out else no_split,
               **startup.describe(run_plan, data), **outlook.rows(run_plan, work, hardware)})
    if log.rank() == 0 and (unusual := outlook.advice(run_plan, work, hardware)):
        log.warn(unusual)
    if log.rank() == 0:
        startup.tell_doubts(run_plan, work, bool(data.held_out))


def _first_weights(config: Config, inputs: Inputs, model: nn.Module,
                   layout: ParallelLayout) -> None:
    began = time.monotonic()
    if inputs.scratch:
        initialise(model, config.seed)
    else:
        load_pretrained(model, inputs.model_dir)
        model_files.require_same(inputs)
    count = sum(p.numel() for p in model.parameters())
    log.info(f"weights: {units.count(count)} parameters {startup.weights_of(config, inputs)} in "
             f"{units.duration(time.monotonic() - began)}")
    torch.manual_seed(config.seed + 1_000_003 * layout.rank)  # dropout differs between ranks
