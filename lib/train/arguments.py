"""The options of stage 04."""

from __future__ import annotations

from pathlib import Path

from lib.core import options
from lib.core.options import Parser
from lib.models import scratch
from lib.optim import registry, schedule
from lib.planning import saving
from lib.train import console

CKPT_FREQ, LOG_FREQ, EVAL_FREQ, EVAL_BATCHES = 500, 10, 500, 100
_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")

# The options that matter most, as the short page of --help tells them.
FIRST = {
    "experiment_name": "name of the run; it lies in outputs/",
    "dataset_name": "dataset of stage 02; several make a mixture",
    "model_name": "model of stage 03",
    "num_epochs": "passes over the data",
    "max_steps": "optimizer steps at most",
    "batch_size": "samples per process in one pass",
    "global_batch_size": "samples per step",
    "seq_length": "tokens per sample",
    "lr": "peak learning rate",
    "dry_run": "print the plan and touch nothing",
}


def add(parser: Parser) -> None:
    """Add all options but those that every stage has."""
    for add_group in (_run, _length, _optimizer, _speed, _ahead, _watch):
        add_group(parser)


def _run(parser: Parser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument("-e", "--experiment-name", metavar="NAME",
                       help="name of the run, a directory under --save-dir; or the path of that "
                            "directory (needed)")
    group.add_argument("-d", "--dataset-name", action="append", default=[], metavar="DIR[=WEIGHT]",
                       help="dataset: a directory, or a name under hf_datasets/; several, each "
                            "with its share of the samples, make a mixture: -d a=0.7 -d b=0.3 "
                            "(needed)")
    group.add_argument("-m", "--model-name", metavar="NAME|DIR",
                       help="model that stage 03 prepared, or any model directory "
                            "(default: the only one prepared)")
    group.add_argument("--save-dir", type=Path, metavar="DIR",
                       help="where experiments lie (default: outputs, or where -e leads)")
    group.add_argument("--cache-dir", type=Path, default=Path(".cache"), metavar="DIR",
                       help="where prepared models and token stores lie")
    group.add_argument("--seed", type=options.seed, default=0, metavar="N",
                       help="decides order of samples, initial weights and dropout")
    group.add_argument("--from-scratch", action="store_true",
                       help="draw the weights from the seed, even if the model has some")
    group.add_argument("--model-size", choices=tuple(scratch.SIZES),
                       help="with --from-scratch: make a model of this size, without stage 03 "
                            "(default: none, the model is -m)")
    group.add_argument("--vocab-size", type=options.positive_int, metavar="N",
                       help="with --model-size: tokens of its vocabulary, padded to a multiple of "
                            f"{scratch.VOCABULARY_MULTIPLE} (default: what --tokenizer has)")
    group.add_argument("--tokenizer", type=Path, metavar="DIR",
                       help="with --model-size: directory with the tokenizer to use "
                            "(default: none, it is needed then)")
    group.add_argument("--trust-remote-code", action="store_true",
                       help="run the code that stage 03 fetched with a model of a type that "
                            "transformers does not know; taken from the command line alone")
    group.add_argument("--prepare-only", action="store_true",
                       help="make the token store, or verify the one there, and stop")
    group.add_argument("--streaming", action="store_true",
                       help="for trying things out: -d is a directory of raw JSON Lines or Parquet "
                            "shards, tokenised while training; needs --max-steps")
    group.add_argument("--text-field", metavar="NAME",
                       help="with --streaming: field or column that holds the text (default: text)")
    group.add_argument("--online", action="store_true",
                       help="with --streaming: -d is a dataset on the Hugging Face Hub, whose "
                            "files are fetched when needed and kept in the cache directory")
    group.add_argument("--include", action="append", default=[], metavar="GLOB",
                       help="with --online: files of the dataset, by path; may be repeated "
                            "(default: all)")
    group.add_argument("--token-reads", choices=("mmap", "pread"), default="mmap",
                       help="how tokens are read: mapped, or by pread for file systems that map "
                            "badly")
    group.add_argument("--resume", default="auto", metavar="auto|never|PATH",
                       help="go on from the newest valid checkpoint, refuse to, or from this one")
    group.add_argument("--resume-with-changes", action="store_true",
                       help="go on although data, batch, seed or other settings that decide the "
                            "result have changed; needs --max-steps")


def _length(parser: Parser) -> None:
    group = parser.add_argument_group("length and batch")
    group.add_argument("--num-epochs", type=options.positive_int, metavar="N",
                       help="passes over the data (default: 1 without --max-steps)")
    group.add_argument("--max-steps", type=options.positive_int, metavar="N",
                       help="optimizer steps at most (default: no limit)")
    group.add_argument("-b", "--batch-size", type=_auto_or_count, default=1,
                       metavar="N|auto",
                       help="samples per process in one pass; auto: as many as fit by the memory "
                            "plan, up to where more are hardly faster")
    group.add_argument("--global-batch-size", type=options.positive_int, metavar="N",
                       help="samples per step over all ranks, instead of --grad-accum-steps "
                            "(default: --batch-size × ranks)")
    group.add_argument("--grad-accum-steps", type=options.positive_int, metavar="N",
                       help="passes per step (default: 1)")
    group.add_argument("-s", "--seq-length", "--seq-len", type=options.positive_int, metavar="N",
                       help="tokens per sample (default: 1024 or the model's limit)")
    group.add_argument("--packing", choices=("concat", "documents"), default="concat",
                       help="concat: windows across documents; documents: whole documents that "
                            "do not see each other, with padding")


def _auto_or_count(text: str) -> int | str:
    return "auto" if text.lower() == "auto" else options.positive_int(text)


def _optimizer(parser: Parser) -> None:
    group = parser.add_argument_group("optimizer")
    group.add_argument("--optimizer", choices=tuple(registry.OPTIMIZERS), default="adamw",
                       help="adamw8bit: moments of one byte per number instead of four")
    group.add_argument("--lr", "--max-lr", type=options.non_negative, metavar="X",
                       help="peak learning rate (default: 3e-5, from scratch 3e-4)")
    group.add_argument("--min-lr", type=options.non_negative, metavar="X",
                       help="learning rate at the last step (default: a tenth of the peak)")
    group.add_argument("--warmup-steps", type=options.count, metavar="N",
                       help="steps of linear warm-up (default: 5 %% of all, at most 1000)")
    group.add_argument("--lr-scheduler", default="cosine", metavar="KIND",
                       choices=schedule.KINDS,
                       help="cosine, linear, constant or wsd (constant, then down in the "
                            "last fifth)")
    group.add_argument("--weight-decay", type=options.non_negative, default=0.1, metavar="X",
                       help="AdamW decay of matrices; norms and biases are not decayed")
    group.add_argument("--beta1", type=options.non_negative, default=0.9, metavar="X",
                       help="AdamW decay of the first moment")
    group.add_argument("--beta2", type=options.non_negative, default=0.95, metavar="X",
                       help="AdamW decay of the second moment")
    group.add_argument("--grad-clip", type=options.non_negative, default=1.0, metavar="X",
                       help="largest global gradient norm, 0 for no limit")
    group.add_argument("--spike-factor", type=options.non_negative, default=30.0, metavar="X",
                       help="a step whose gradient norm is over X times the usual (a mean of "
                            "100 steps) changes nothing, like one that is NaN or infinite; 0: it "
                            "does")
    group.add_argument("--rollback-after", type=options.positive_int, default=20, metavar="N",
                       help="after N such steps in a row go back to the checkpoint before them "
                            "and pass over their data, three times at most")
    group.add_argument("--precision", "--mixed-precision", choices=_PRECISIONS,
                       type=options.dtype(*_PRECISIONS),
                       help="compute dtype; masters are float32; bfloat16, float16 and float32 "
                            "mean the same; fp8: as bf16, but the products of the blocks' linears "
                            "in 8 bits, on a GPU of the Ada generation or newer (default: bf16 "
                            "where the hardware has it, else fp32)")
    group.add_argument("--fp8-recipe", choices=("tensorwise", "rowwise"), default="tensorwise",
                       help="with --precision fp8: a scale for each tensor, which is fastest, or "
                            "for each of its rows, which rounds less")


def _speed(parser: Parser) -> None:
    group = parser.add_argument_group("speed and memory (none of it changes what is learned)")
    group.add_argument("--activation-checkpointing", default="none",
                       choices=("none", "selective", "full"),
                       help="activations to compute again in the backward pass instead of keeping "
                            "them: none, selective (the cheap ones) or full (all of a block)")
    group.add_argument("--compile", type=options.auto_on_off, metavar="auto|on|off",
                       help="compile the decoder blocks; the first step then takes a minute longer "
                            "(default: auto, on with a GPU where the model allows it)")
    group.add_argument("--deterministic", type=options.on_off, default=False, metavar="on|off",
                       help="on a GPU: the same bits each time, also after a resume, at a price in "
                            "speed that is printed")
    group.add_argument("--attention", default="auto",
                       choices=("auto", "sdpa", "varlen", "flash_attention_2", "flex"),
                       help="auto: varlen for packed documents on a GPU, else sdpa")
    group.add_argument("--use-flash-attn", dest="attention", action="store_const",
                       const="flash_attention_2", help="short for --attention flash_attention_2")
    group.add_argument("--cpu-offload", type=options.on_off, default=False, metavar="on|off",
                       help="keep shards and optimizer states in host memory, at a price in speed")
    group.add_argument("--shard-size", type=options.positive_int, metavar="N",
                       help="ranks that share one replica (HSDP), say the GPUs of a node "
                            "(default: all ranks)")


def _ahead(parser: Parser) -> None:
    group = parser.add_argument_group("memory and checkpoints ahead of time (with --dry-run, on "
                                      "any machine)")
    group.add_argument("--plan-gpus", type=options.counts, metavar="N,N,…",
                       help="print the memory per GPU on so many GPUs, for each kind of activation "
                            "checkpointing and several batch sizes (default: only the bytes of "
                            "its states on the ranks of this launch)")
    group.add_argument("--plan-gpu-memory", type=options.positive, default=80.0, metavar="GIB",
                       help="memory of one of those GPUs")
    group.add_argument("--plan-gpu-tflops", type=options.positive, metavar="X",
                       help="TFLOP/s that one of them reaches at most, by its data sheet, for the "
                            "time of a run (default: 989, of an H100; 67 in fp32)")
    group.add_argument("--plan-mtbf-hours", type=options.positive, metavar="HOURS",
                       default=saving.GPU_HOURS_PER_FAILURE,
                       help="mean time to a failure of one of those GPUs (hours between failures "
                            "of a job × its GPUs), for the best time between checkpoints (default: "
                            "45566, as published for Llama 3 405B on 16,384 GPUs)")
    group.add_argument("--plan-write-gbps", type=options.positive, default=2.0, metavar="GB/S",
                       help="rate at which all ranks together write to --save-dir")
    group.add_argument("--plan-step-seconds", type=options.positive, metavar="S",
                       help="duration of a step there, to tell --ckpt-freq in steps "
                            "(default: not told in steps)")


def _watch(parser: Parser) -> None:
    group = parser.add_argument_group("logs, checkpoints and evaluation")
    group.add_argument("--log-freq", "--log-interval", type=options.positive_int,
                       default=LOG_FREQ, metavar="N", help="steps between log lines")
    group.add_argument("--log-style", choices=console.STYLES, default="line",
                       help="on the console: an aligned line for people, or the dict with the "
                            "four timers that each rank's log has")
    group.add_argument("--ckpt-freq", "--checkpoint-interval", type=options.positive_int,
                       default=CKPT_FREQ, metavar="N", help="steps between checkpoints")
    group.add_argument("--ckpt-keep", type=options.count, default=3, metavar="N",
                       help="newest checkpoints to keep (2 at least, and always the one with the "
                            "lowest validation loss), 0 for all")
    group.add_argument("--ckpt-keep-every", type=options.positive_int, metavar="N",
                       help="also keep the checkpoints of steps that are multiples of N "
                            "(default: none)")
    group.add_argument("--ckpt-async", type=options.on_off, default=True, metavar="on|off",
                       help="write checkpoints while training goes on, from copies in host memory")
    group.add_argument("--ckpt-local-dir", type=Path, metavar="DIR",
                       help="on each node's own disk: also save there, more often; a resume with "
                            "the same ranks takes whichever is newest (default: none)")
    group.add_argument("--ckpt-hyperpod", metavar="auto|URL",
                       help="instead of --ckpt-local-dir: in the memory of the HyperPod cluster, "
                            "whose service is found by itself or at an address (default: not used)")
    group.add_argument("--ckpt-local-freq", type=options.positive_int, metavar="N",
                       help="steps between those (default: a tenth of --ckpt-freq)")
    group.add_argument("--eval-freq", type=options.count, default=EVAL_FREQ, metavar="N",
                       help="steps between evaluations, 0 for only at the end")
    group.add_argument("--eval-batches", type=options.positive_int, default=EVAL_BATCHES,
                       metavar="N", help="global batches of the validation split in an evaluation")
    group.add_argument("--max-minutes", type=options.positive, metavar="X",
                       help="save and stop (exit code 75) when the run has taken so long; the same "
                            "command goes on (default: no limit)")
    group.add_argument("--watchdog-minutes", type=options.non_negative, default=30.0, metavar="X",
                       help="end a process whose step takes longer, with the stacks of its threads "
                            "in logs/; 0 for never")
    group.add_argument("--wandb", type=options.on_off, default=False, metavar="on|off",
                       help="also log to Weights & Biases, offline, in the experiment's wandb/ "
                            "(`wandb sync` sends it later)")
    group.add_argument("--profile", type=options.span, metavar="START:END",
                       help="steps to record: a trace and a table of operations per rank, on a GPU "
                            "also its memory, in the experiment's profile/ (default: none)")
