#!/usr/bin/env python3
"""Stage 04: train a causal language model; run the same command again to resume.

  torchrun --nproc-per-node 8 04_train_fsdp.py -e exp -d hf_datasets/corpus
  python 04_train_fsdp.py -e exp -d corpus --dry-run   # the plan; needs no GPU
  torchrun --nproc-per-node 8 04_train_fsdp.py --bench --model-size 7B   # speed

  torchrun --nproc-per-node 8 04_train_fsdp.py -e exp -d corpus -m meta-llama/Llama-3.1-8B \\
      --global-batch-size 256 --num-epochs 1
  python 04_train_fsdp.py -e exp -d corpus --dry-run --plan-gpus 8,64    # estimate memory on 8, 64
  python 04_train_fsdp.py -e exp -d corpus --prepare-only    # tokenise ahead of time
  torchrun 04_train_fsdp.py -e exp -d raw_text --streaming --max-steps 100    # without stage 02

Shards the model with FSDP2. Reads a dataset from stage 02 and a model from stage 03, and uses no
network except with --online and --ckpt-copy-to s3://…. Writes outputs/<exp>/.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from lib.core import commands, declared, log, options, stage
from lib.runs.events import Event
from lib.runs.figures import Status
from lib.train.command_line import add_options, read_options, require_names
from lib.train.config import Config
from lib.train.output.kinds import choose_kind

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    import torch
    from transformers import PreTrainedModel

    from lib.checkpoints.checkpointer import Checkpointer
    from lib.parallel.layout import ParallelLayout
    from lib.parallel.loss import LossFunction, ZLoss
    from lib.parallel.meeting import Meeting
    from lib.parallel.routers import RouterLoad
    from lib.parallel.stop_request import StopRequest
    from lib.planning.memory import MemoryEstimate
    from lib.runs.journal import Journal
    from lib.tokens.batches import DataStream
    from lib.train.data import Data
    from lib.train.inputs import Inputs
    from lib.train.output.meters import Meters
    from lib.train.output.output import Output
    from lib.train.output.report import Report
    from lib.train.output.rows import Divergence, Evaluation, LossWindow
    from lib.train.plan import Plan
    from lib.train.sampling import Sampling
    from lib.train.state import TrainState


def parse(argv: list[str]) -> Config:
    """Return the options of the command line and --config. Raises UsageError without -e or -d."""
    parser = options.Parser(__doc__, "-e NAME -d DIR [options]", declared.first_page(Config))
    add_options(parser)
    typed = read_options(parser, argv)
    kind = choose_kind(typed)
    kind.begin_log(typed)
    config = kind.fill_options(typed)
    require_names(config, run=commands.help_of())
    return config


def main(argv: list[str]) -> None:
    """Plan, prepare the tokens, and train, unless the run is already complete."""
    typed = parse(argv)

    from lib.train import checks, previous_run
    from lib.train.copying import copy_complete_run, restore_lost_run
    from lib.train.inputs import find_inputs, is_complete
    from lib.train.launches import drop_one_time_options, is_restart
    from lib.train.new_model import model_from_scratch
    from lib.train.output.table import open_output
    from lib.train.settle import settle_from_files
    from lib.train.sources.table import choose_source

    # Only these two know whether the run is a bench, and where its samples come from.
    output = open_output(typed)
    source = choose_source(typed)
    experiment = output.experiment
    log.show_times(not (typed.dry_run or typed.prepare_only))
    log.keep_details(output.keeps_files and not (typed.dry_run or typed.prepare_only))
    config = drop_one_time_options(typed, is_restart(experiment))
    restore_lost_run(config, experiment)
    earlier_run = {} if config.overwrite else previous_run.read_previous(experiment)
    has_begun = bool(earlier_run)
    checks.require_consistent(config, has_begun)
    with model_from_scratch(config, experiment, output.kind, source, has_begun) as new_model:
        inputs = find_inputs(config, experiment, output.kind, source, new_model, earlier_run)
        if is_complete(settle_from_files(config, inputs), experiment, inputs):
            copy_complete_run(config, experiment)
        else:
            prepare_and_train(config, output, inputs)


def prepare_and_train(typed_config: Config, output: Output, inputs: Inputs) -> None:
    """Fill in the options that are left open, then print the plan, prepare the tokens, or train."""
    from lib.parallel import gpus
    from lib.parallel.layout import configure_torch, meet_ranks
    from lib.train import memory_fit, overview, resume
    from lib.train.copying import begin_copying
    from lib.train.data import prepare_prompts
    from lib.train.model_files import require_base_of_run, verify_model_files
    from lib.train.output.symptoms import explain_errors
    from lib.train.settle import settle_options
    from lib.train.suite import read_tasks

    experiment = output.experiment
    configure_torch()
    gpus.hide_gpus(typed_config.device)
    if not (typed_config.prepare_only or typed_config.plan_gpus):
        gpus.require_usable_gpus(typed_config.dry_run)
        if typed_config.cpu_offload:
            gpus.warn_without_offload(typed_config.device, "--cpu-offload")
        if typed_config.activation_offload:
            gpus.warn_without_offload(typed_config.device, "--activation-offload")
        gpus.report_unused(typed_config.device)
    config, model, memory = settle_options(typed_config, output, inputs)
    tasks = read_tasks(config, inputs.source)
    if config.dry_run:
        overview.show_plan(config, inputs, model, output)
        memory_fit.warn_of_memory(config, inputs, memory)
        return
    meeting = None
    if not config.prepare_only:
        memory_fit.require_memory(config, inputs, memory)
        memory_fit.suggest_batch(config, memory, has_begun=bool(inputs.earlier_run))
        meeting = meet_ranks()
    if output.reads_weights:
        inputs = verify_model_files(config, inputs)
    require_base_of_run(experiment, inputs)
    prompts = prepare_prompts(config, inputs.model_dir, inputs.template)
    # This may take hours, so it comes after all checks and before any process group exists.
    encoding = inputs.encode_for(model.config.get_text_config().vocab_size)
    data = replace(inputs.source.prepare_samples(config, encoding), prompts=prompts, tasks=tasks)
    if config.prepare_only:
        log.info("next: " + commands.as_typed(drop=["--prepare-only"]))
        return
    with explain_errors(config, experiment), ExitStack() as stack:  # closed in reverse order
        run = set_up(config, output, inputs, model, data, meeting, stack)
        begin_copying(stack, run.state, run.checkpointer, run.meters, run.stop_request)
        while (divergence := train(run)) is not None:
            resume.roll_back(run.state, run.checkpointer, experiment, run.report, divergence)
        run.report.note_state(Status.COMPLETE)
        run.checkpointer.clear(run.state.step)
        run.report.finish()
        output.suggest_next(config)


class Run(NamedTuple):
    """The parts that the training loop uses."""

    config: Config
    plan: Plan
    layout: ParallelLayout
    state: TrainState
    stream: DataStream
    compute_loss: LossFunction
    z_loss: ZLoss | None
    routers: RouterLoad
    meters: Meters
    evaluation: Evaluation
    sampling: Sampling
    checkpointer: Checkpointer
    report: Report
    stop_request: StopRequest


def set_up(
    typed_config: Config,
    output: Output,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    meeting: Meeting | None,
    stack: ExitStack,
) -> Run:
    """Return a run at its first step, or at the step of the checkpoint that it resumes from.

    All ranks must call this. Raises ExperimentHeld if another launch trains the run, UsageError
    if ranks were started with different options, ArtifactError if no checkpoint of the run is
    valid.
    """
    from lib.models import float8
    from lib.parallel.compiling import make_compiler
    from lib.parallel.loss import ZLoss, build_loss
    from lib.parallel.stop_request import StopRequest
    from lib.planning import capacity
    from lib.train import overview, resume
    from lib.train.experiment import compute_digests
    from lib.train.model import load_first_weights, make_optimizer, set_up_kernels, shard_model
    from lib.train.output.meters import Meters
    from lib.train.output.rows import Evaluation
    from lib.train.sampling import Sampling
    from lib.train.state import TrainState

    experiment = output.experiment
    layout, plan, journal, estimate = join_ranks(
        typed_config, output, inputs, model, data, meeting, stack
    )
    config = plan.config
    checkpointer = output.make_checkpointer(plan, layout, journal)
    cost = overview.measure_cost(config, inputs, model)
    hardware = overview.get_hardware(config, layout)
    overview.show_head(plan, inputs, model, data, cost, hardware, output)
    # The model is sharded before it has memory; its weights come further down.
    compiler = make_compiler(config.compile, layout.device, layout)
    in_use = capacity.memory_usage(layout.device)["memory/current_gib"]  # before the model
    routers = shard_model(config, inputs, model, layout, compiler)
    optimizer, guard = make_optimizer(config, model, layout, compiler)
    stream = stack.enter_context(closing(data.stream(plan, layout.device)))
    records_model = layout.rank == 0 and output.keeps_files
    digests = compute_digests(experiment.model) if records_model else {}
    state = TrainState(model, optimizer, guard, plan, layout, digests, inputs.base)
    # Resume from the newest checkpoint or the one that --resume names, or start.
    if not resume.resume_run(state, checkpointer, experiment, inputs, journal):
        load_first_weights(config, inputs, model, layout)
        journal.add_event(Event.START, 0, ranks=layout.ranks)
    float8.update_scales_with(optimizer, model)
    set_up_kernels(config, model, layout)
    z_loss = ZLoss(config.z_loss, layout.device) if config.z_loss else None
    compute_loss = build_loss(model, layout, config.packing, compiler, z_loss)
    meters = Meters(config, experiment, layout, cost, hardware.peak, in_use, state.step)
    report = output.make_report(inputs, journal, state, stream, meters, estimate)
    evaluated = output.select_evaluated(data)
    return Run(
        config,
        plan,
        layout,
        state,
        stream,
        compute_loss,
        z_loss,
        routers,
        stack.enter_context(meters),
        Evaluation.of_run(evaluated, inputs.model_dir, model, plan, layout),
        Sampling(data, inputs.model_dir, plan, layout),
        checkpointer,
        stack.enter_context(report),
        # Until here a signal ends the process at once, since nothing has been trained.
        StopRequest(layout, experiment.stop_file, config.max_minutes),
    )


def join_ranks(
    typed_config: Config,
    output: Output,
    inputs: Inputs,
    model: PreTrainedModel,
    data: Data,
    meeting: Meeting | None,
    stack: ExitStack,
) -> tuple[ParallelLayout, Plan, Journal, MemoryEstimate]:
    """Connect all ranks, agree on the options of the run, and claim its output."""
    from lib.core.watchdog import longest_section
    from lib.parallel import determinism
    from lib.parallel.layout import ParallelLayout
    from lib.planning.memory import MemoryEstimate
    from lib.train import checks, memory_fit
    from lib.train.launches import join_launch
    from lib.train.plan import Plan
    from lib.train.settle import agree_on_options

    # The estimate forks a process, so it comes first.
    estimate = stack.enter_context(MemoryEstimate(model, typed_config.precision))
    if typed_config.deterministic:
        determinism.require_determinism()
    layout = stack.enter_context(
        ParallelLayout.start(
            partial(memory_fit.agree_on_shards, typed_config),
            meeting,
            longest_section(typed_config.watchdog_minutes),
        )
    )
    launch = join_launch(output.experiment, layout)
    config = agree_on_options(typed_config, launch, data.samples_per_epoch, layout)
    estimate.begin(memory_fit.make_local_step_config(config, model, data.most_documents))
    plan = Plan.of(config, inputs.fingerprints, data.samples_per_epoch, layout.rank)
    checks.require_enough_steps(config, plan.total_steps, has_begun=bool(inputs.earlier_run))
    plan.require_alike(layout)
    journal = output.make_journal(layout.rank, launch.has_begun)
    stack.enter_context(output.claim(plan, inputs, data.chat, journal, launch, layout))
    return layout, plan, journal, estimate


def save_step(run: Run, stopping: bool = False) -> None:
    """Save the state after a step; without `stopping`, perhaps in the background."""
    with run.meters.pause("save"):
        run.report.follow_save(run.checkpointer.save(run.state, stopping))


def evaluate_step(run: Run) -> str:
    """Evaluate and sample if due; return "", or the reason to stop that has ended it."""
    from lib.parallel.stop_request import StopRequested

    state = run.state
    report = run.report
    require_none = run.stop_request.require_none
    try:
        if run.evaluation.is_due(state.step):
            with run.meters.pause("evaluation"):
                report.add_validation(run.evaluation, state.model, run.compute_loss, require_none)
        report.write_held()
        if run.sampling.is_due(state.step):
            with run.meters.pause("samples"):
                report.add_samples(run.sampling, require_none)
    except StopRequested as stop:
        return stop.reason
    if state.unevaluated:
        state.unevaluated = {}
        facts = state.evaluation_facts()
        report.follow_save(run.checkpointer.record_evaluation(state.step, facts))
    return ""


def train(run: Run) -> Divergence | None:
    """Train to the last step; return earlier if the run has diverged and must be rolled back."""
    from lib.optim.registry import set_learning_rate
    from lib.parallel.parallelize import begin_pass
    from lib.train.output.rows import LossWindow

    state = run.state
    if state.unevaluated and (stopping := evaluate_step(run)):  # the last launch ended in it
        run.report.note_stop(stopping)
    optimizer = state.optimizer
    timers = run.meters.timers
    window = LossWindow(run.layout, run.z_loss)
    run.routers.begin_window()
    steps = run.stream.steps(state.position, run.plan.total_steps - state.step)  # reads ahead
    timers.restart()
    while state.step < run.plan.total_steps:
        run.stop_request.begin_agreement()
        run.meters.begin_step(state.step + 1)
        learning_rate = run.plan.schedule.lr(state.step)
        set_learning_rate(optimizer, learning_rate)
        with timers("data"):
            step = next(steps)
        # The loss is a sum over all label tokens of the step, and gradients are over all ranks.
        scaled = state.guard.scale_for(step.label_tokens)
        run.routers.begin_step(step, scaled.loss)
        for number, batch in enumerate(step.batches, 1):
            begin_pass(state.model, number == len(step.batches), run.config.keep_gathered)
            with timers("data"):
                batch = batch.to(run.layout)
            with timers("forward"):
                run.routers.begin_pass(batch)
                loss = run.compute_loss(batch, scaled.loss)
            with timers("backward"):
                loss.backward()
            window.add(loss)
        with timers("update"):
            grad_norm = state.guard.clip(optimizer, run.config.grad_clip, scaled)
            with timers("optimizer"):
                optimizer.step()  # changes nothing if the norm is NaN or infinite
            run.routers.end_step(optimizer.found_inf)
            optimizer.zero_grad(set_to_none=True)
        state.advance(step)
        window.end_step(step.label_tokens, sum(batch.count_pairs() for batch in step.batches))
        run.meters.end_step(state.step)
        run.report.count_step()
        run.checkpointer.poll(state)

        stopping = run.stop_request.agree_on_reason()
        divergence = log_step(run, window, grad_norm, learning_rate, bool(stopping))
        if divergence is not None:
            return divergence
        if run.checkpointer.is_due(state.step) and not stopping:  # before an evaluation
            save_step(run)
            stopping = run.stop_request.agree()  # a save may take long, too
        stopping = stopping or evaluate_step(run)
        if stopping:
            save_step(run, stopping=True)  # only waits if the step is saved already
            run.report.note_stop(stopping)  # raises Preempted if steps are left
    return None


def log_step(
    run: Run, window: LossWindow, grad_norm: torch.Tensor, learning_rate: float, stopping: bool
) -> Divergence | None:
    """Write the captured row, and capture one if due. Return a divergence unless the run stops."""
    step = run.state.step
    report = run.report
    divergence = report.write_captured()  # while the device still computes the last step
    evaluating = run.evaluation.is_due(step)
    has_row = report.is_due(step) or evaluating or stopping
    if has_row and (divergence is None or stopping):
        report.capture(window, run.routers, grad_norm, learning_rate)
        # A save or an evaluation waits for the device anyway, and a checkpoint follows its row.
        follows = evaluating or run.sampling.is_due(step)
        if follows or stopping or run.checkpointer.is_due(step):
            divergence = report.write_captured(hold=follows)
    return None if stopping else divergence


if __name__ == "__main__":
    stage.run_main(main)
