#!/usr/bin/env python3
"""Stage 04: train a causal language model with FSDP2; run the same command again to resume.

  torchrun 04_train_fsdp.py -e exp -d hf_datasets/corpus
  torchrun --nproc-per-node 8 04_train_fsdp.py -e exp -d corpus -m meta-llama/Llama-3.1-8B \\
      --global-batch-size 256 --num-epochs 1
  python 04_train_fsdp.py -e exp -d corpus --dry-run         # the plan, on any machine
  python 04_train_fsdp.py -e exp -d corpus --dry-run --plan-gpus 8,64    # and its memory there
  python 04_train_fsdp.py -e exp -d corpus --prepare-only    # tokenise ahead of time

  torchrun 04_train_fsdp.py -e exp -d raw_text --streaming --max-steps 100    # without stage 02

Reads a dataset of stage 02 and a model of stage 03, and never the network (but with --online).
Writes outputs/<exp>/.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lib.core import log, options, paths, stage
from lib.core.errors import Preempted, UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.models import scratch
from lib.train import goodput, schedule

if TYPE_CHECKING:  # imports torch, which --help does not wait for
    from lib.train.run import Run


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__)
    run = parser.add_argument_group("the run")
    run.add_argument("-e", "--experiment-name", metavar="NAME",
                     help="directory of the run under --save-dir")
    run.add_argument("-d", "--dataset-name", action="append", default=[], metavar="DIR[=WEIGHT]",
                     help="dataset: a directory, or a name under hf_datasets/; several, each with "
                          "its share of the samples, make a mixture: -d a=0.7 -d b=0.3")
    run.add_argument("-m", "--model-name", metavar="NAME|DIR",
                     help="model that stage 03 prepared, or any model directory "
                          "(default: the one prepared last)")
    run.add_argument("--save-dir", type=Path, default=Path("outputs"), metavar="DIR",
                     help="where experiments lie")
    run.add_argument("--cache-dir", type=Path, default=Path(".cache"), metavar="DIR",
                     help="where prepared models and token stores lie")
    run.add_argument("--seed", type=options.seed, default=0, metavar="N",
                     help="decides order of samples, initial weights and dropout")
    run.add_argument("--from-scratch", action="store_true",
                     help="draw the weights from the seed, even if the model has some")
    run.add_argument("--model-size", choices=tuple(scratch.SIZES),
                     help="with --from-scratch: make a model of this size, without stage 03")
    run.add_argument("--vocab-size", type=options.positive_int, metavar="N",
                     help="with --model-size: tokens of its vocabulary, padded to a multiple of "
                          f"{scratch.VOCABULARY_MULTIPLE} (default: what --tokenizer has)")
    run.add_argument("--tokenizer", type=Path, metavar="DIR",
                     help="with --model-size: directory with the tokenizer to use")
    run.add_argument("--prepare-only", action="store_true",
                     help="make the token store, or verify the one there, and stop")
    run.add_argument("--streaming", action="store_true",
                     help="for trying things out: -d is a directory of raw JSON Lines or Parquet "
                          "shards, tokenised while training; needs --max-steps")
    run.add_argument("--text-field", metavar="NAME",
                     help="with --streaming: field or column that holds the text (default: text)")
    run.add_argument("--online", action="store_true",
                     help="with --streaming: -d is a dataset on the Hugging Face Hub, whose files "
                          "are fetched when needed and kept in the cache directory")
    run.add_argument("--include", action="append", default=[], metavar="GLOB",
                     help="with --online: files of the dataset, by path; may be repeated (default: "
                          "all)")
    run.add_argument("--token-reads", choices=("mmap", "pread"), default="mmap",
                     help="how tokens are read: mapped, or by pread for file systems that map "
                          "badly")
    run.add_argument("--resume", default="auto", metavar="auto|never|PATH",
                     help="go on from the newest valid checkpoint, refuse to, or from this one")

    run.add_argument("--resume-with-changes", action="store_true",
                     help="go on although data, batch, seed or other settings that decide the "
                          "result have changed; needs --max-steps")

    length = parser.add_argument_group("length and batch")
    length.add_argument("--num-epochs", type=options.positive_int, metavar="N",
                        help="passes over the data (default: 1, or endless with --max-steps)")
    length.add_argument("--max-steps", type=options.positive_int, metavar="N",
                        help="optimizer steps at most")
    length.add_argument("-b", "--batch-size", type=options.positive_int, default=1, metavar="N",
                        help="samples per process in one pass")
    length.add_argument("--global-batch-size", type=options.positive_int, metavar="N",
                        help="samples per step over all ranks (instead of --grad-accum-steps)")
    length.add_argument("--grad-accum-steps", type=options.positive_int, metavar="N",
                        help="passes per step (default: 1)")
    length.add_argument("-s", "--seq-length", "--seq-len", type=options.positive_int, metavar="N",
                        help="tokens per sample (default: 1024, or the model's limit if lower)")

    length.add_argument("--packing", choices=("concat", "documents"), default="concat",
                        help="concat: windows across documents; documents: whole documents that "
                             "do not see each other, with padding")

    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument("--optimizer", choices=("adamw", "adamw8bit"), default="adamw",
                           help="adamw8bit: moments of one byte per number instead of four")
    optimizer.add_argument("--lr", "--max-lr", type=options.non_negative, metavar="X",
                           help="peak learning rate (default: 3e-5, from scratch 3e-4)")
    optimizer.add_argument("--min-lr", type=options.non_negative, metavar="X",
                           help="learning rate at the last step (default: a tenth of the peak)")
    optimizer.add_argument("--warmup-steps", type=options.count, metavar="N",
                           help="steps of linear warm-up (default: 5 %% of all, at most 1000)")
    optimizer.add_argument("--lr-scheduler", default="cosine", metavar="KIND",
                           choices=schedule.KINDS,
                           help="cosine, linear, constant or wsd (constant, then down in the "
                                "last fifth)")
    optimizer.add_argument("--weight-decay", type=options.non_negative, default=0.1, metavar="X",
                           help="AdamW decay of matrices; norms and biases are not decayed")
    optimizer.add_argument("--beta1", type=options.non_negative, default=0.9, metavar="X",
                           help="AdamW decay of the first moment")
    optimizer.add_argument("--beta2", type=options.non_negative, default=0.95, metavar="X",
                           help="AdamW decay of the second moment")
    optimizer.add_argument("--grad-clip", type=options.non_negative, default=1.0, metavar="X",
                           help="largest global gradient norm, 0 for no limit")
    optimizer.add_argument("--spike-factor", type=options.non_negative, default=30.0, metavar="X",
                           help="a step whose gradient norm is over X times the usual (a mean of "
                                "100 steps) changes nothing, like one that is no number; 0: it "
                                "does")
    optimizer.add_argument("--rollback-after", type=options.positive_int, default=20, metavar="N",
                           help="after N such steps in a row go back to the checkpoint before them "
                                "and pass over their data, three times at most")
    optimizer.add_argument("--precision", "--mixed-precision", choices=("bf16", "fp16", "fp32"),
                           help="compute dtype (default: bf16 where the hardware has it, else "
                                "fp32); masters are float32")

    speed = parser.add_argument_group("speed and memory (none of it changes what is learned)")
    speed.add_argument("--activation-checkpointing", default="none",
                       choices=("none", "selective", "full"),
                       help="activations to compute again in the backward pass instead of keeping "
                            "them: none, selective (the cheap ones) or full (all of a block)")
    speed.add_argument("--compile", type=options.on_off, default=False, metavar="on|off",
                       help="compile the decoder blocks; the first step then takes a minute longer")
    speed.add_argument("--attention", default="auto",
                       choices=("auto", "sdpa", "varlen", "flash_attention_2", "flex"),
                       help="auto: varlen for packed documents on a GPU, else sdpa")
    speed.add_argument("--use-flash-attn", dest="attention", action="store_const",
                       const="flash_attention_2", help="short for --attention flash_attention_2")
    speed.add_argument("--cpu-offload", type=options.on_off, default=False, metavar="on|off",
                       help="keep shards and optimizer states in host memory, at a price in speed")
    speed.add_argument("--shard-size", type=options.positive_int, metavar="N",
                       help="ranks that share one replica (HSDP), say the GPUs of a node "
                            "(default: all ranks)")

    ahead = parser.add_argument_group("memory and checkpoints ahead of time (with --dry-run, "
                                      "on any machine)")
    ahead.add_argument("--plan-gpus", type=options.counts, metavar="N,N,…",
                       help="print the memory per GPU on so many GPUs, for each kind of activation "
                            "checkpointing and several batch sizes")
    ahead.add_argument("--plan-gpu-memory", type=options.positive, default=80.0, metavar="GIB",
                       help="memory of one of those GPUs")
    ahead.add_argument("--plan-mtbf-hours", type=options.positive, metavar="HOURS",
                       default=goodput.GPU_HOURS_PER_FAILURE,
                       help="mean time to a failure of one of those GPUs (hours between failures "
                            "of a job × its GPUs), for the best time between checkpoints (default: "
                            "45566, as published for Llama 3 405B on 16,384 GPUs)")
    ahead.add_argument("--plan-write-gbps", type=options.positive, default=2.0, metavar="GB/S",
                       help="rate at which all ranks together write to --save-dir")
    ahead.add_argument("--plan-step-seconds", type=options.positive, metavar="S",
                       help="duration of a step there, to tell --ckpt-freq in steps")

    watch = parser.add_argument_group("logs, checkpoints and evaluation")
    watch.add_argument("--log-freq", "--log-interval", type=options.positive_int, default=10,
                       metavar="N", help="steps between log lines")
    watch.add_argument("--ckpt-freq", "--checkpoint-interval", type=options.positive_int,
                       default=500, metavar="N", help="steps between checkpoints")
    watch.add_argument("--ckpt-keep", type=options.count, default=3, metavar="N",
                       help="newest checkpoints to keep (2 at least, and always the one with the "
                            "lowest validation loss), 0 for all")
    watch.add_argument("--ckpt-keep-every", type=options.positive_int, metavar="N",
                       help="also keep the checkpoints of steps that are multiples of N")
    watch.add_argument("--ckpt-async", type=options.on_off, default=True, metavar="on|off",
                       help="write checkpoints while training goes on, from copies in host memory")
    watch.add_argument("--ckpt-local-dir", type=Path, metavar="DIR",
                       help="on each node's own disk: also save there, more often; a resume with "
                            "the same ranks takes whichever is newest")
    watch.add_argument("--ckpt-local-freq", type=options.positive_int, metavar="N",
                       help="steps between those (default: a tenth of --ckpt-freq)")
    watch.add_argument("--eval-freq", type=options.count, default=500, metavar="N",
                       help="steps between evaluations, 0 for only at the end")
    watch.add_argument("--eval-batches", type=options.positive_int, default=100, metavar="N",
                       help="global batches of the validation split in an evaluation")
    watch.add_argument("--max-minutes", type=options.positive, metavar="X",
                       help="save and stop (exit code 75) when the run has taken so long; the same "
                            "command goes on")
    watch.add_argument("--watchdog-minutes", type=options.non_negative, default=30.0, metavar="X",
                       help="end a process whose step takes longer, with the stacks of its threads "
                            "in logs/; 0 for never")
    watch.add_argument("--wandb", type=options.on_off, default=False, metavar="on|off",
                       help="also log to Weights & Biases, offline, in the experiment's wandb/ "
                            "(`wandb sync` sends it later)")
    watch.add_argument("--profile", type=options.span, metavar="START:END",
                       help="steps to record: a trace and a table of operations per rank, on a GPU "
                            "also its memory, in the experiment's profile/")
    parser.add_common(workers="tokenise")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Plan, prepare the tokens, and train unless that is already done."""
    opts = parse(argv)
    if not opts.experiment_name or not opts.dataset_name:
        raise UsageError("-e and -d are needed: a name for the run, and a dataset",
                         run="torchrun 04_train_fsdp.py -e exp -d hf_datasets/corpus")
    if not paths.is_name(opts.experiment_name):
        raise UsageError(f"-e {opts.experiment_name!r} is no name for an experiment",
                         expected="a name for a directory, without / and not beginning with - or .")

    from lib.train import from_scratch

    with from_scratch.model(opts) as made:
        plan_and_train(opts, Experiment(opts.save_dir, opts.experiment_name), made)


def plan_and_train(opts: Options, experiment: Experiment, made: Path | None) -> None:
    """Do what the options say. made: the directory of the model of --model-size."""
    from lib.train import startup

    inputs = startup.find_inputs(opts, experiment, made)
    if startup.is_complete(opts, experiment, inputs):
        return
    setting = startup.check(opts, experiment, inputs)
    if opts.dry_run:
        startup.print_plan(opts, inputs, setting)
        return
    data = startup.prepare_data(opts, inputs, setting)
    if opts.prepare_only:
        log.info("next: the same command without --prepare-only")
        return

    from lib.train import resume
    from lib.train.begin import begin
    from lib.train.symptoms import explained

    run = None
    try:
        run = begin(opts, experiment, inputs, setting, data)
        while not train(run):
            resume.roll_back(run)
    except BaseException as error:
        if run is not None:
            run.failed(error)
            run.close(in_order=isinstance(error, Preempted))
        raise (explained(error, opts, experiment) or error) from error
    run.finish()
    log.info(startup.next_command(experiment))
    run.close(in_order=True)


def train(run: Run) -> bool:
    """The training loop, from the step the run stands at to its last one.

    Returns False when many steps in a row were bad: the run should go back to an earlier one.
    """
    import torch

    from lib.train import distributed
    from lib.train.loss import token_loss_sum
    from lib.train.optimizer import set_learning_rate

    plan, world, model, timers = run.plan, run.world, run.model, run.timers
    steps = run.feed.steps(run.step, plan.total_steps)
    window_loss, window_tokens = torch.zeros((), dtype=torch.float64, device=world.device), 0
    timers.restart()
    for step in range(run.step, plan.total_steps):
        run.stop_request.ask()
        run.profiler.before(step + 1)
        learning_rate = plan.schedule.lr(step)
        set_learning_rate(run.optimizer, learning_rate)
        step_loss = torch.zeros((), dtype=torch.float64, device=world.device)
        with timers("data"):
            batch = next(steps)
        # The loss is a sum over all label tokens of the step, and FSDP averages over the ranks.
        scale = run.step_guard.scale * world.size / batch.label_tokens
        for number, micro_batch in enumerate(batch.micro_batches, 1):
            # Replicas exchange gradients once per step (their shards are summed in each pass).
            model.set_requires_all_reduce(number == len(batch.micro_batches))
            with timers("data"):
                on_device = micro_batch.to(world.device)
            with timers("forward"):
                loss = token_loss_sum(model, on_device)
            with timers("backward"):
                (loss * scale).backward()
            step_loss += loss.detach()
        with timers("update"):
            grad_norm = run.step_guard.clip(run.optimizer, run.options.grad_clip)
            with timers("optimizer"):
                run.optimizer.step()  # nothing where the norm is no number
            run.optimizer.zero_grad(set_to_none=True)
        run.step_done(batch)
        window_loss, window_tokens = window_loss + step_loss, window_tokens + batch.label_tokens

        stopping = run.stop_request.agreed()
        evaluating = run.evaluation_is_due() and not stopping  # a launcher waits half a minute
        if run.log_is_due() or evaluating or stopping:
            losses = distributed.total([step_loss.item(), window_loss.item()], world)
            figures = run.figures(losses[0] / batch.label_tokens, grad_norm, learning_rate)
            if evaluating:
                figures |= run.evaluate()
            run.report(figures, losses[1] / window_tokens)
            window_loss, window_tokens = torch.zeros_like(window_loss), 0
            if run.has_diverged() and not stopping:
                return False
        run.save_if_due(stopping)
        if stopping and run.step < plan.total_steps:
            again = " without --overwrite" if run.options.overwrite else ""
            raise Preempted(f"stopped by {stopping} after step {run.step}, which is saved; run the "
                            f"same command again{again} to go on")
    return True


if __name__ == "__main__":
    stage.run(main)
