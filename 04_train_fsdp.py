#!/usr/bin/env python3
"""Stage 04: train a causal language model; run the same command again to resume.

  torchrun --nproc-per-node 8 04_train_fsdp.py -e exp -d hf_datasets/corpus
  python 04_train_fsdp.py -e exp -d corpus --dry-run     # the plan, anywhere

  torchrun --nproc-per-node 8 04_train_fsdp.py -e exp -d corpus -m meta-llama/Llama-3.1-8B \\
      --global-batch-size 256 --num-epochs 1
  python 04_train_fsdp.py -e exp -d corpus --dry-run --plan-gpus 8,64    # memory of other machines
  python 04_train_fsdp.py -e exp -d corpus --prepare-only    # tokenise ahead of time
  torchrun 04_train_fsdp.py -e exp -d raw_text --streaming --max-steps 100    # without stage 02

Shards the model with FSDP2. Reads a dataset of stage 02 and a model of stage 03, and never the
network (but with --online). Writes outputs/<exp>/.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lib.core import commands, declared, log, options, stage
from lib.core.errors import UsageError
from lib.core.events import Event
from lib.core.paths import Experiment
from lib.train.command_line import add_options, read_options
from lib.train.config import Config

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    import torch
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from lib.checkpoints.checkpointer import Checkpointer
    from lib.optim.guard import StepGuard
    from lib.parallel.compiling import Compiler
    from lib.parallel.layout import ParallelLayout
    from lib.parallel.loss import LossSum
    from lib.parallel.meeting import Meeting
    from lib.parallel.routers import RouterLoad
    from lib.parallel.stop_request import StopRequest
    from lib.planning.memory import MemoryEstimate
    from lib.tokens.batches import DataStream
    from lib.train.data import Data
    from lib.train.inputs import Inputs
    from lib.train.journal import Journal
    from lib.train.meters import Meters
    from lib.train.plan import Plan
    from lib.train.report import Report
    from lib.train.rows import Divergence, Evaluation, LossWindow
    from lib.train.state import TrainState


def parse(argv: list[str]) -> Config:
    """Return the options of the command line and of --config; UsageError without -e or -d."""
    parser = options.Parser(__doc__, "-e NAME -d DIR [options]", declared.first_page(Config))
    add_options(parser)
    config = read_options(parser, argv)
    if not config.experiment_name or not config.dataset_name:
        raise UsageError(
            "-e and -d are needed: a name for the run, and a dataset",
            expected="-e exp -d hf_datasets/corpus, say",
            run=commands.help_of(),
        )
    return config


def main(argv: list[str]) -> None:
    """Plan, prepare the tokens, and train unless that is already done."""
    config = parse(argv)

    from lib.train import checks, earlier, launches
    from lib.train.inputs import find_inputs, is_complete, model_from_scratch, settle

    log.show_times(not (config.dry_run or config.prepare_only))
    experiment = Experiment(config.save_dir, config.experiment_name)
    if launches.has_begun(experiment):
        config = launches.act_once(config)
    begun = {} if config.overwrite else earlier.read(experiment)
    checks.require_sound(config, has_begun=bool(begun))
    with model_from_scratch(config, experiment, bool(begun)) as made:  # None without --model-size
        inputs = find_inputs(config, experiment, made, begun)
        config = settle(config, inputs)
        if not is_complete(config, experiment, inputs):
            prepare_and_train(config, experiment, inputs)


def prepare_and_train(config: Config, experiment: Experiment, inputs: Inputs) -> None:
    """Do what the options say: a plan, the tokens, or all of a run."""
    from lib.parallel import gpus
    from lib.parallel.layout import configure_allocator, meet
    from lib.train import fitting, overview, resume
    from lib.train.data import prepare_data
    from lib.train.model import build_model
    from lib.train.model_files import require_begun_base, require_whole_model
    from lib.train.plan import next_command
    from lib.train.symptoms import explain_errors

    configure_allocator()
    gpus.hide_gpus(config.device)
    if not (config.prepare_only or config.plan_gpus):
        gpus.require_usable_gpus(config.dry_run)
        if config.cpu_offload:
            gpus.warn_without_offload(config.device)
        gpus.report_unused(config.device)
    config, model = build_model(fitting.default_batch(config, inputs), experiment, inputs)
    config, fit = fitting.settle(config, inputs, model)
    if config.dry_run:
        overview.show_plan(config, inputs, model)
        fitting.warn(config, inputs, fit)
        return
    meeting = None
    if not config.prepare_only:
        fitting.require(config, inputs, fit)
        fitting.advise(config, fit, has_begun=bool(inputs.begun))
        meeting = meet()
    inputs = require_whole_model(config, inputs)
    require_begun_base(experiment, inputs)
    # Perhaps hours, so before any process group exists.
    data = prepare_data(config, inputs, model.config.get_text_config().vocab_size)
    if config.prepare_only:
        log.info("next: " + commands.as_typed(drop=["--prepare-only", "--show-samples"]))
        return
    with explain_errors(config, experiment), ExitStack() as stack:  # closed in the reverse order
        run = set_up(config, experiment, inputs, model, data, meeting, stack)
        while (divergence := train(run)) is not None:
            resume.roll_back(run.state, run.checkpointer, experiment, run.report, divergence)
        run.report.note_state("complete")
        run.checkpointer.delete_tier_checkpoints(run.state.step)
        run.report.finish()
        log.info(next_command(config, experiment))


class Run(NamedTuple):
    """What the training loop holds."""

    config: Config
    plan: Plan
    layout: ParallelLayout
    state: TrainState
    stream: DataStream
    loss_sum: LossSum
    routers: RouterLoad
    meters: Meters
    evaluation: Evaluation
    checkpointer: Checkpointer
    report: Report
    stop_request: StopRequest


def make_optimizer(
    config: Config, model: PreTrainedModel, layout: ParallelLayout, compiler: Compiler | None
) -> tuple[Optimizer, StepGuard]:
    """Return the optimizer of a sharded model, and the guard that clips and checks its steps."""
    from lib.optim import registry
    from lib.optim.guard import StepGuard
    from lib.parallel import parallelize
    from lib.train.model import update_device

    wrap = compiler.for_part(f"the update of {config.optimizer}").wrap if compiler else None
    optimizer = registry.build_optimizer(
        config.optimizer, model, config.lr, registry.read_options(config.optimizer, config), wrap
    )
    device = update_device(config, layout)
    guard = StepGuard(
        config.precision,
        config.spike_factor,
        device,
        layout.ranks,
        fold=device.type == "cuda",
        divisor=parallelize.gradient_divisor(layout.fsdp),
    )
    return optimizer, guard


def set_up(
    config: Config,
    experiment: Experiment,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    meeting: Meeting | None,
    stack: ExitStack,
) -> Run:
    """Return a run that stands at its first step, or where a checkpoint left off.

    All ranks must call this. Raises ExperimentHeld, UsageError for ranks that were not started
    alike, ArtifactError when no checkpoint of the run is valid.
    """
    from lib.models import float8
    from lib.parallel.compiling import make_compiler
    from lib.parallel.loss import build_loss
    from lib.parallel.stop_request import StopRequest
    from lib.planning import capacity
    from lib.train import overview, resume
    from lib.train.experiment import digests
    from lib.train.meters import Meters
    from lib.train.model import first_weights, pick_kernels, shard
    from lib.train.report import Report
    from lib.train.rows import Evaluation
    from lib.train.state import TrainState

    layout, plan, journal, estimate = agree(config, experiment, inputs, model, data, meeting, stack)
    config = plan.config
    # From here on a signal is noted: the first step ends a run that is still loading.
    stop_request = StopRequest(layout, experiment.stop_file, config.max_minutes)
    checkpointer = make_checkpointer(plan, experiment, layout, journal)
    work = overview.work_of(config, inputs, model)
    hardware = overview.hardware_of(config, layout)
    overview.show_head(plan, inputs, model, data, work, hardware)
    # The model: sharded before it has memory. What is in it comes further down.
    compiler = make_compiler(config.compile, layout.device)
    memory_before = capacity.memory_usage(layout.device)["memory/current_gib"]
    routers = shard(config, inputs, model, layout, compiler)
    optimizer, guard = make_optimizer(config, model, layout, compiler)
    stream = stack.enter_context(closing(data.stream(plan, layout.device)))
    state = TrainState(
        model,
        optimizer,
        guard,
        plan,
        layout,
        digests(experiment.model) if layout.rank == 0 else {},
        inputs.base,
    )
    # The run goes on from the newest checkpoint, or from the one that --resume names, or begins.
    if not resume.resume(state, checkpointer, experiment, inputs, journal):
        first_weights(config, inputs, model, layout)
        journal.add_event(Event.START, 0, ranks=layout.ranks)
    float8.update_scales_with(optimizer, model)
    pick_kernels(config, model, layout)
    loss_sum = build_loss(model, layout, config.packing, compiler)
    meters = Meters(
        config, experiment, layout, work.flops, hardware.peak, memory_before, state.step
    )
    report = stack.enter_context(Report(experiment, journal, state, stream, meters, estimate))
    return Run(
        config,
        plan,
        layout,
        state,
        stream,
        loss_sum,
        routers,
        stack.enter_context(meters),
        Evaluation(data.held_out, plan, layout),
        checkpointer,
        report,
        stop_request,
    )


def agree(
    config: Config,
    experiment: Experiment,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    meeting: Meeting | None,
    stack: ExitStack,
) -> tuple[ParallelLayout, Plan, Journal, MemoryEstimate]:
    """Bring all ranks together for one run, whose directory they hold from now on."""
    from lib.core.watchdog import longest_section
    from lib.parallel import determinism
    from lib.parallel.layout import ParallelLayout
    from lib.planning.memory import MemoryEstimate
    from lib.train import checks, fitting, launches
    from lib.train.experiment import claim
    from lib.train.journal import Journal
    from lib.train.plan import Plan

    estimate = stack.enter_context(MemoryEstimate(model, config.precision))  # forks: comes first
    if config.deterministic:
        determinism.require_determinism()
    layout = stack.enter_context(
        ParallelLayout.start(
            partial(fitting.agree_on_shards, config),
            meeting,
            longest_section(config.watchdog_minutes),
        )
    )
    config = fitting.agree(config, data.samples, layout)
    estimate.begin(fitting.step_config_here(config, model, data.most_documents))
    config, launch = launches.join(config, experiment, layout)
    plan = Plan.of(config, inputs.fingerprints, data.samples, layout.rank)
    checks.require_room(config, plan.total_steps, has_begun=bool(inputs.begun))
    plan.require_alike(layout)
    journal = Journal(experiment, layout.rank)
    stack.enter_context(claim(config, experiment, plan, inputs, data.chat, journal, launch, layout))
    log.add_file(experiment.rank_log(layout.rank))
    return layout, plan, journal, estimate


def make_checkpointer(
    plan: Plan, experiment: Experiment, layout: ParallelLayout, journal: Journal
) -> Checkpointer:
    """Return what saves the run as its options say, in two tiers where they ask for that."""
    import torch

    from lib.checkpoints.checkpointer import Checkpointer, make_tier
    from lib.planning import capacity
    from lib.train.journal import read_config

    config = plan.config
    tier = make_tier(
        config.ckpt_hyperpod,
        config.ckpt_local_dir,
        config.experiment_name,
        read_config(experiment)["run"],
        layout,
        journal.add_event,
    )
    return Checkpointer(
        experiment.checkpoints,
        layout,
        plan.identity(),
        total_steps=plan.total_steps,
        every=config.ckpt_freq,
        keep=config.ckpt_keep,
        keep_every=config.ckpt_keep_every or 0,
        tier=tier,
        tier_every=config.ckpt_local_freq,
        note=journal.add_event,
        free_memory=(lambda: capacity.room(torch.device("cpu"))) if config.ckpt_async else None,
    )


def train(run: Run) -> Divergence | None:
    """The training loop, from the step the run stands at to its last one.

    Returns where so many steps in a row were bad that an earlier state is better, if anywhere.
    """
    from lib.optim.registry import set_learning_rate
    from lib.parallel.parallelize import begin_pass
    from lib.train.rows import LossWindow

    config = run.config
    plan = run.plan
    layout = run.layout
    state = run.state
    model = state.model
    optimizer = state.optimizer
    guard = state.guard
    meters = run.meters
    timers = run.meters.timers
    window = LossWindow(layout)
    run.routers.begin_window()
    steps = run.stream.steps(state.position, plan.total_steps - state.step)  # a thread reads ahead
    timers.restart()
    while state.step < plan.total_steps:
        run.stop_request.ask()
        meters.begin_step(state.step + 1)
        learning_rate = plan.schedule.lr(state.step)
        set_learning_rate(optimizer, learning_rate)
        with timers("data"):
            step = next(steps)
        # The loss is a sum over all label tokens of the step, and gradients are over all ranks.
        scaled = guard.scale_for(step.label_tokens)
        run.routers.begin_step(step, scaled.loss)
        for number, batch in enumerate(step.batches, 1):
            begin_pass(model, number == len(step.batches), bool(config.keep_gathered))
            with timers("data"):
                batch = batch.to(layout)
            with timers("forward"):
                run.routers.begin_pass(batch)
                loss = run.loss_sum(batch, scaled.loss)
            with timers("backward"):
                loss.backward()
            window.add(loss)
        with timers("update"):
            grad_norm = guard.clip(optimizer, config.grad_clip, scaled)
            with timers("optimizer"):
                optimizer.step()  # changes nothing where the norm is NaN or infinite
            run.routers.end_step(optimizer.found_inf)
            optimizer.zero_grad(set_to_none=True)
        state.advance(step)
        window.end_step(step.label_tokens)
        meters.end_step(state.step)
        run.report.count_step()
        run.checkpointer.poll(state)

        stopping = run.stop_request.agreed()
        divergence = log_step(run, window, grad_norm, learning_rate, bool(stopping))
        if divergence is not None:
            return divergence
        if run.checkpointer.is_due(state.step) or stopping:
            with meters.pause("save"):
                run.checkpointer.save(state, bool(stopping), run.report.save_callback())
        if stopping:
            run.report.note_stop(stopping)  # raises Preempted where steps are left
    return None


def log_step(
    run: Run, window: LossWindow, grad_norm: torch.Tensor, learning_rate: float, stopping: bool
) -> Divergence | None:
    """Write the row of the step before, and capture the row of the last step if one is due.

    Returns where the run has diverged, if a row that was written shows that and the run goes on.
    """
    step = run.state.step
    report = run.report
    # The device has the work of the last step while the host reads the row before.
    divergence = report.write_captured()
    evaluating = run.evaluation.is_due(step) and not stopping  # a launcher waits 30 s
    if (divergence is None or stopping) and (report.is_due(step) or evaluating or stopping):
        report.capture(window, run.routers, grad_norm, learning_rate)
        if evaluating:
            with run.meters.pause("evaluation"):
                report.add_validation(run.evaluation, run.state.model, run.loss_sum)
        # A save or an evaluation waits for the device anyway, and a checkpoint follows its row.
        if evaluating or stopping or run.checkpointer.is_due(step):
            divergence = report.write_captured()
    return None if stopping else divergence


if __name__ == "__main__":
    stage.run(main)
