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

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.core import commands, declared, log, options, stage
from lib.core.errors import Preempted, UsageError
from lib.core.paths import Experiment
from lib.train.config import Config, add_options, read_options

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    from lib.train.run import Run


def parse(argv: list[str]) -> Config:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__, "-e NAME -d DIR [options]", declared.first_page(Config))
    add_options(parser)
    return read_options(parser, argv)


def main(argv: list[str]) -> None:
    """Plan, prepare the tokens, and train unless that is already done."""
    config = parse(argv)
    if not config.experiment_name or not config.dataset_name:
        raise UsageError("-e and -d are needed: a name for the run, and a dataset",
                         expected="-e exp -d hf_datasets/corpus, say", run=commands.help_of())

    from lib.train import checks, earlier, from_scratch, launches

    experiment = Experiment(config.save_dir, config.experiment_name)
    if launches.has_begun(experiment):
        config = launches.act_once(config)
    begun = {} if config.overwrite else earlier.read(experiment)
    checks.require_sound(config, has_begun=bool(begun))
    with from_scratch.model(config) as made:
        plan_and_train(config, experiment, made, begun)


def plan_and_train(config: Config, experiment: Experiment, made: Path | None,
                   begun: dict[str, Any]) -> None:
    """Do what the options say. made: the model of --model-size, if any. begun: see Inputs."""
    from lib.train import startup

    inputs = startup.find_inputs(config, experiment, made, begun)
    config = startup.settle(config, inputs)
    if startup.is_complete(config, experiment, inputs):
        return

    from lib.parallel.layout import meet, settle_allocator
    from lib.train import dry_run, fitting, model_files

    settle_allocator()
    config, model = startup.build_model(config, experiment, inputs)
    config = fitting.settle(config, model)

    if config.dry_run:
        dry_run.print_plan(config, inputs, model)
        fitting.warn(config, inputs, model)
        return
    if not config.prepare_only:
        fitting.require(config, inputs, model)
        fitting.advise(config, model, has_begun=bool(inputs.begun))
        meeting = meet()
    model_files.require_whole(config, inputs)
    data = startup.prepare_data(config, inputs, model)
    if config.prepare_only:
        log.info("next: " + commands.again(drop=["--prepare-only"]))
        return

    from lib.train import resume
    from lib.train.begin import begin
    from lib.train.symptoms import explained

    run = None
    try:
        run = begin(config, experiment, inputs, model, data, meeting)
        while not train(run):
            resume.roll_back(run)
    except BaseException as error:
        if run is not None:
            run.failed(error)
            run.close(in_order=isinstance(error, Preempted))
        raise (explained(error, config, experiment) or error) from error
    run.finish()
    log.info(startup.next_command(config, experiment))
    run.close(in_order=True)


def train(run: Run) -> bool:
    """The training loop, from the step the run stands at to its last one.

    Returns False when many steps in a row were bad: the run should go back to an earlier one.
    """
    import torch

    from lib.optim.registry import set_learning_rate
    from lib.parallel.loss import token_loss_sum

    plan, layout, model, timers = run.plan, run.layout, run.model, run.timers
    steps = run.stream.steps(run.position, plan.total_steps - run.step)
    window_loss, window_tokens = torch.zeros((), dtype=torch.float64, device=layout.device), 0
    timers.restart()
    for step in range(run.step, plan.total_steps):
        run.stop_request.ask()
        run.profiler.before(step + 1)
        learning_rate = plan.schedule.lr(step)
        set_learning_rate(run.optimizer, learning_rate)
        step_loss = torch.zeros((), dtype=torch.float64, device=layout.device)
        with timers("data"):
            batch = next(steps)
        # The loss is a sum over all label tokens of the step, and gradients are over all ranks.
        scale = run.step_guard.loss_factor(batch.label_tokens)
        for number, micro_batch in enumerate(batch.batches, 1):
            # Replicas exchange gradients once per step (their shards are summed in each pass).
            model.set_requires_all_reduce(number == len(batch.batches))
            with timers("data"):
                on_device = micro_batch.to(layout.device)
            with timers("forward"):
                loss = token_loss_sum(model, on_device, scale)
            with timers("backward"):
                loss.backward()
            step_loss += loss.detach()
        with timers("update"):
            grad_norm = run.step_guard.clip(run.optimizer, run.config.grad_clip)
            with timers("optimizer"):
                run.optimizer.step()  # changes nothing where the norm is NaN or infinite
            run.optimizer.zero_grad(set_to_none=True)
        run.step_done(batch)
        window_loss, window_tokens = window_loss + step_loss, window_tokens + batch.label_tokens

        stopping = run.stop_request.agreed()
        evaluating = run.evaluation_is_due() and not stopping  # a launcher waits half a minute
        if run.log_is_due() or evaluating or stopping:
            losses = layout.total([step_loss.item(), window_loss.item()])
            means = losses[0] / batch.label_tokens, losses[1] / window_tokens
            figures = run.figures(*means, grad_norm, learning_rate)
            if evaluating:
                figures |= run.evaluate()
            run.tell(figures)
            window_loss, window_tokens = torch.zeros_like(window_loss), 0
            if run.has_diverged() and not stopping:
                return False
        run.save_if_due(stopping)
        if stopping and run.step < plan.total_steps:
            raise run.preempted(stopping)
    return True


if __name__ == "__main__":
    stage.run(main)
