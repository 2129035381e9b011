"""Declare all options of stage 04, each as one field of `Config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.core import declared, options
from lib.core.declared import Role, option
from lib.core.options import (
    auto_on_off,
    count,
    factor,
    non_negative,
    on_off,
    positive,
    positive_int,
)
from lib.models import scratch
from lib.optim import registry, schedule
from lib.parallel.degrees import RECOMPUTATIONS
from lib.runs import figures

AUTO = "auto"  # the value of options that lib/train/settle.py replaces by another one
OFF = "off"
SEQ_LENGTH = 1024  # tokens, the default where the model allows it
EARLIER_LAUNCH = "earlier launch"  # in settled_by: the run was started with this value
RESULT, ALIKE, LOCAL = Role
_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")


def _auto_or_count(text: str) -> int | str:
    return AUTO if text.lower() == AUTO else positive_int(text)


def _auto_off_or_positive(text: str) -> float | str:
    if text.lower() == AUTO:
        return AUTO
    # YAML reads `off` as false, and a loss times 0 is no loss.
    return OFF if text.lower() in (OFF, "false", "no") else non_negative(text) or OFF


def _or_switch(
    on: str | None, off: str, parse: Callable[[str], str] = str
) -> Callable[[str], str | None]:
    """Return a parser that also accepts the words for on and off that other trainers use.

    on, off: the values that these words stand for. parse: the parser of all other words.
    """
    words = {
        **dict.fromkeys(("on", "true", "yes", "1"), on),
        **dict.fromkeys(("off", "false", "no", "0"), off),
    }

    def read(text: str) -> str | None:
        return words[text.lower()] if text.lower() in words else parse(text)

    return read


@dataclass(frozen=True)
@declared.with_options_of(*registry.list_option_classes(), after="lr_scheduler")
class Config:
    """Contains the options of a run.

    An option is open while its value is None or AUTO; lib/train/settle.py gives it a value.
    settled_by: the reason for each value that was chosen in this way, by field.
    """

    experiment_name: str = option(
        None,
        "-e",
        group="the run",
        role=LOCAL,
        first="name of the run; files go to outputs/NAME",
        metavar="NAME",
        help="name of the run, a directory under --save-dir, or a path to its directory; "
        "not needed with --checkpoint-dir or --bench (required)",
    )
    dataset_name: list[str] = option(
        [],
        "-d",
        role=LOCAL,
        first="dataset of stage 02; several make a mixture",
        metavar="DIR[=WEIGHT]",
        help="dataset of stage 02: a directory, or a name under hf_datasets/. Several make a "
        "mixture, each with its share of the samples: -d a=0.7 -d b=0.3. synthetic[:TOKENS]: "
        "random tokens, which need no dataset and no tokenizer; an epoch has TOKENS of them, by "
        "default 100M. With --bench, -d synthetic is the default (required)",
    )
    model_name: str | None = option(
        None,
        "-m",
        aliases=("hf_model", "model_name_or_path", "base_model"),
        role=LOCAL,
        first="prepared model",
        metavar="NAME|DIR",
        help="model that stage 03 prepared, or any model directory; on resume, the default is the "
        "model of the run (default: the only one in --cache-dir)",
    )
    save_dir: Path = option(
        None,
        role=LOCAL,
        parse=Path,
        help="parent directory of the runs (default: outputs; if -e is a path, its parent)",
    )
    checkpoint_dir: Path | None = option(
        None,
        aliases=("output_dir",),
        role=LOCAL,
        parse=Path,
        help="with -e, the same as --save-dir; without -e, the directory of the run itself, with "
        "checkpoints in DIR/checkpoints (default: none)",
    )
    cache_dir: Path = option(
        Path(".cache"), role=LOCAL, parse=Path, help="directory of prepared models and token stores"
    )
    seed: int = option(
        0,
        aliases=("training.seed", "debug.seed"),
        role=RESULT,
        renumbers=True,
        parse=options.seed,
        help="seed of the order of samples, the initial weights and dropout",
    )
    from_scratch: bool = option(
        False,
        role=RESULT,
        help="initialise the weights from --seed, even if the model directory contains weights",
    )
    model_size: str | None = option(
        None,
        role=RESULT,
        quiet=True,
        choices=tuple(scratch.SIZES),
        help="create a model of this size from scratch, without stage 03 (default: use -m)",
    )
    config_json: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        metavar="FILE",
        help="instead of a size, a config.json of any architecture that transformers supports: "
        "train such a model from scratch (default: none)",
    )
    vocab_size: int | None = option(
        None,
        role=RESULT,
        quiet=True,
        parse=positive_int,
        help="with --model-size or --config-json: tokens in the vocabulary, padded to a multiple "
        f"of {scratch.VOCABULARY_MULTIPLE} (default: as in --tokenizer or --config-json; 1,024 "
        "for 1M, 4,096 for tiny, 32,000 for the other sizes)",
    )
    tokenizer: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        help="with --model-size or --config-json: directory of the tokenizer (default: a tokenizer "
        "trained on -d; with --streaming, one token per byte; none with -d synthetic)",
    )
    trust_remote_code: bool = option(
        False,
        role=LOCAL,
        help="run the Python code that stage 03 fetched with a model whose type transformers does "
        "not know; only the command line can set this, not --config",
    )
    prepare_only: bool = option(
        False,
        role=LOCAL,
        help="tokenise the dataset, or verify an existing token store, and stop before training",
    )
    show_samples: int = option(
        0,
        role=LOCAL,
        parse=count,
        help="print N samples of each dataset before training, and mark the trained tokens",
    )
    streaming: bool = option(
        False,
        role=LOCAL,
        help="for quick trials: -d is a directory of raw JSON Lines or Parquet shards, tokenised "
        "while training; needs --max-steps",
    )
    text_field: str | None = option(
        None,
        role=LOCAL,
        metavar="NAME",
        help="with --streaming: field or column that contains the text (default: text)",
    )
    online: bool = option(
        False,
        role=LOCAL,
        help="with --streaming: -d is a dataset on the Hugging Face Hub; its files are downloaded "
        "when needed and kept in --cache-dir",
    )
    include: list[str] = option(
        [],
        role=LOCAL,
        metavar="GLOB",
        help="with --online: paths of the dataset's files to use; may be repeated (default: all)",
    )
    chat_template: Path | None = option(
        None,
        aliases=("chat_template_path",),
        role=LOCAL,
        parse=Path,
        metavar="FILE|chatml|plain",
        help="chat datasets: Jinja template that renders conversations; chatml and plain are "
        "built in (default: the model's)",
    )
    chat_template_kwargs: str = option(
        "",
        role=RESULT,
        quiet=True,
        renumbers=True,
        parse=options.parse_variables,
        metavar="JSON",
        help="chat datasets: variables for the chat template, such as "
        "'{\"enable_thinking\": false}'; those of a record come first (default: none)",
    )
    train_on: str = option(
        "assistant",
        role=RESULT,
        quiet=True,
        renumbers=True,
        choices=("assistant", "last", "all"),
        help="chat datasets: train on all answers of the assistant, only the last "
        "answer, or all tokens",
    )
    too_long: str = option(
        "drop",
        role=RESULT,
        quiet=True,
        renumbers=True,
        choices=("drop", "split"),
        help="chat datasets: what to do with a conversation of more than --seq-length tokens: drop "
        "it, or split it between turns and repeat the system prompt in each part",
    )
    resume: str = option(
        "auto",
        role=ALIKE,
        metavar="auto|never|copies|PATH",
        help="auto: resume from the newest valid checkpoint; never: fail if the run exists; "
        "copies: as auto, and take over a lost run of this name from --ckpt-copy-to; PATH: resume "
        "from this checkpoint",
    )
    resume_with_changes: bool = option(
        False,
        role=ALIKE,
        help="resume even if data, batch size, seed or other options that affect the result have "
        "changed; needs --max-steps",
    )

    lora_rank: int = option(
        0,
        aliases=("lora_r",),
        group="LoRA",
        role=RESULT,
        quiet=True,
        parse=count,
        help="train a LoRA adapter of rank N and freeze the base model; 0: train the model itself",
    )
    lora_alpha: float = option(
        None,
        role=RESULT,
        quiet=True,
        parse=positive,
        help="scale of the adapter: its output is multiplied by alpha ÷ rank (default: "
        "2 × --lora-rank)",
    )
    lora_dropout: float = option(
        0.0,
        role=RESULT,
        quiet=True,
        parse=non_negative,
        help="dropout probability of the adapter's inputs, from 0 to below 1",
    )
    lora_targets: str = option(
        "all-linear",
        role=RESULT,
        quiet=True,
        metavar="all-linear|attention|mlp|REGEX",
        help="linear layers of the blocks that get an adapter (routers only by REGEX); REGEX "
        "matches the full name of a layer or its last part: 'q_proj|v_proj'",
    )
    lora_rslora: bool = option(
        False,
        aliases=("use_rslora", "peft_use_rslora"),
        role=RESULT,
        quiet=True,
        parse=on_off,
        help="rsLoRA: scale by alpha ÷ √rank instead of alpha ÷ rank, for large ranks",
    )
    lora_from: Path | None = option(
        None,
        aliases=("lora_model_dir",),
        role=LOCAL,
        parse=Path,
        help="adapter directory of PEFT or stage 05 to start from; it defines rank, alpha and "
        "targets (default: A is initialised from --seed, B is zero)",
    )

    num_epochs: int | None = option(
        None,
        aliases=("num_train_epochs", "epochs"),
        group="length and batch",
        role=LOCAL,
        parse=positive_int,
        first="passes over the data",
        help="passes over the data (default: 1, or until --max-steps)",
    )
    max_steps: int | None = option(
        None,
        aliases=("max_training_steps", "training.steps"),
        role=LOCAL,
        parse=positive_int,
        first="maximum number of optimizer steps",
        help="maximum number of optimizer steps (default: no limit)",
    )
    steps_per_epoch: int | None = option(
        None,
        role=LOCAL,
        parse=positive_int,
        help="optimizer steps that --num-epochs counts as one epoch, whatever the size of the data "
        "(default: one pass over the data)",
    )
    batch_size: int = option(
        None,
        "-b",
        aliases=(
            "per_device_train_batch_size",
            "micro_batch_size",
            "train_batch_size",
            "training.local_batch_size",
            "training.batch_size",
        ),
        role=LOCAL,
        parse=_auto_or_count,
        first="micro-batch size",
        metavar="N|auto",
        help="samples per process in a micro-batch. auto: as many as fit in memory, at most "
        "32,768 tokens (2,048 on a CPU). With --global-batch-size, the default is 1 everywhere "
        "(default: auto, on a CPU 1)",
    )
    global_batch_size: int | None = option(
        None,
        aliases=("training.global_batch_size",),
        role=RESULT,
        parse=positive_int,
        first="samples per step",
        help="samples per optimizer step over all ranks; replaces --grad-accum-steps, which "
        "otherwise multiplies the default (default: --batch-size × ranks)",
    )
    grad_accum_steps: int | None = option(
        None,
        aliases=("gradient_accumulation_steps", "training.gradient_accumulation_steps"),
        role=LOCAL,
        parse=positive_int,
        help="micro-batches per optimizer step (default: 1)",
    )
    seq_length: int = option(
        None,
        "-s",
        "--seq-len",
        aliases=(
            "max_seq_length",
            "max_length",
            "block_size",
            "model_max_length",
            "sequence_len",
            "max_context_width",
            "training.seq_len",
        ),
        role=RESULT,
        renumbers=True,
        parse=positive_int,
        first="tokens per sample",
        help=f"sequence length: tokens per sample (default: {SEQ_LENGTH} or the model's limit)",
    )
    packing: str = option(
        None,
        aliases=("sample_packing",),
        role=RESULT,
        renumbers=True,
        parse=_or_switch("documents", "none"),
        nargs="?",
        const="documents",
        choices=("concat", "documents", "none"),
        help="concat: samples are windows over the concatenated documents. documents: samples "
        "consist of whole documents with padding, and attention does not cross their boundaries. "
        "none: a sample is one document with padding, for models that cannot keep documents "
        "apart (default: documents with a chat dataset, else concat)",
    )

    optimizer: str = option(
        registry.DEFAULT,
        group="optimizer",
        role=RESULT,
        quiet=True,
        choices=tuple(registry.OPTIMIZERS),
        help=f"optimizer; {registry.describe_choices()}",
    )
    lr: float = option(
        None,
        "--max-lr",
        aliases=("learning_rate", "optimizer.lr"),
        role=RESULT,
        parse=non_negative,
        first="peak learning rate",
        help="peak learning rate; with LoRA the default is 10 times as much (default: 3e-5, from "
        "scratch 3e-4)",
    )
    min_lr: float = option(
        None,
        role=RESULT,
        parse=non_negative,
        help="learning rate at the last step (default: a tenth of the peak)",
    )
    warmup_steps: int | None = option(
        None,
        aliases=("lr_scheduler.warmup_steps",),
        role=RESULT,
        parse=count,
        help="steps of linear warm-up (default: 5 %% of all steps, at most 1000)",
    )
    lr_scheduler: str = option(
        "cosine",
        aliases=("lr_scheduler_type",),
        role=RESULT,
        metavar="KIND",
        choices=schedule.KINDS,
        help="learning rate schedule: cosine, linear, constant or wsd (constant, then decay over "
        "the last fifth of the steps after warm-up)",
    )
    grad_clip: float = option(
        1.0,
        aliases=("max_grad_norm", "training.max_norm"),
        role=RESULT,
        parse=non_negative,
        help="maximum global norm of the gradients; 0: no clipping",
    )
    spike_factor: float = option(
        30.0,
        role=RESULT,
        parse=factor,
        help="skip the update of a step if its gradient norm exceeds X times the running mean of "
        "100 steps; 0: never. Steps with NaN or infinite gradients are always skipped",
    )
    rollback_after: int = option(
        20,
        role=ALIKE,
        parse=positive_int,
        help="after N skipped steps in a row, return to the last checkpoint and skip the data of "
        "these steps, at most three times",
    )
    router_aux_loss: float | str = option(
        AUTO,
        role=RESULT,
        quiet=(AUTO, OFF),
        parse=_auto_off_or_positive,
        metavar="auto|off|X",
        help="mixture-of-experts models: coefficient of the load-balancing loss, or for families "
        "with sigmoid routers the update rate of their biases. auto: the family's value when "
        "training from scratch; in fine-tuning, only if the model's config sets "
        "output_router_logits (default: auto)",
    )
    precision: str = option(
        None,
        "--mixed-precision",
        role=RESULT,
        choices=_PRECISIONS,
        nargs="?",
        parse=_or_switch(None, "fp32", options.dtype(*_PRECISIONS)),
        help="compute dtype (bfloat16, float16 and float32 are accepted too; without a value, the "
        "default); master weights stay float32. fp8: bf16, with the linear layers of the blocks "
        "in 8 bits, on Ada GPUs or newer (default: bf16 if the hardware supports it, else "
        "fp32)",
    )
    fp8_recipe: str = option(
        "tensorwise",
        role=RESULT,
        quiet=True,
        choices=("tensorwise", "rowwise"),
        help="with --precision fp8: one scale per tensor, which is fastest, or one per row, which "
        "is more precise",
    )

    device: str = option(
        "auto",
        group="speed and memory (no effect on the result, up to rounding)",
        role=ALIKE,
        choices=("auto", "cpu"),
        help="auto: the GPUs of this machine, or its CPU if there are none; GPUs that torch cannot "
        "use are an error. cpu: the CPU, even if there are GPUs",
    )
    activation_checkpointing: str = option(
        AUTO,
        aliases=("gradient_checkpointing",),
        role=ALIKE,
        parse=_or_switch("full", "none"),
        nargs="?",
        const="full",
        choices=(AUTO, *RECOMPUTATIONS),
        help="activations to recompute in the backward pass: none, selective (cheap operations) or "
        "full (whole blocks). auto: the least that fits in memory; a resumed run does not go below "
        "its earlier value. The option without a value means full",
    )
    compile: bool | None = option(
        None,
        role=ALIKE,
        parse=auto_on_off,
        help="torch.compile the decoder blocks, the loss and the update of "
        f"{registry.list_compiled()}; the first step takes a minute longer. on: fail if the blocks "
        "cannot be compiled. auto: compile on GPUs, and warn about parts that cannot be compiled "
        "(default: auto)",
    )
    deterministic: bool = option(
        False,
        role=ALIKE,
        parse=on_off,
        help="on GPUs: bitwise identical results across runs and resumes; attention is slower",
    )
    attention: str = option(
        "auto",
        aliases=("attn_implementation",),
        role=ALIKE,
        choices=("auto", "flash", "sdpa", "varlen", "flash_attention_2", "flex"),
        help="attention implementation. auto: varlen for packed documents on a GPU, else sdpa. "
        "flash: flash_attention_2 if its package is installed and supports training here, else "
        "auto",
    )
    cpu_offload: bool = option(
        False,
        role=ALIKE,
        parse=on_off,
        help="keep the sharded weights and optimizer state in host memory, which is slower",
    )
    keep_gathered: bool | None = option(
        None,
        role=ALIKE,
        parse=auto_on_off,
        help="do not reshard the weights of the blocks after the forward pass or between the "
        "micro-batches of a step: fewer all-gathers, but more memory; not with --cpu-offload "
        "(default: auto, on if there is enough memory)",
    )
    shard_size: int | None = option(
        None,
        role=ALIKE,
        parse=positive_int,
        help="ranks that share one replica of the model (HSDP), such as the GPUs of a node "
        "(default: all ranks; with four or more nodes, the ranks of one node, if a step fits in "
        "memory)",
    )

    bench: bool = option(
        False,
        group="measuring and planning",
        role=ALIKE,
        help="measure 20 steps after 5 steps of warm-up, with random weights and by default on "
        "-d synthetic. Print tokens/s, MFU (on GPUs), memory, the time by phase and the share of "
        "communication, as a table and as one line of JSON on standard output. Save nothing",
    )
    plan_only_warn: bool = option(
        False,
        role=LOCAL,
        help="start the run even if the memory estimate says that it does not fit, and only warn",
    )
    plan_gpus: list[int] | None = option(
        None,
        role=LOCAL,
        parse=options.parse_counts,
        metavar="N,N,…",
        help="with --dry-run: print the memory per GPU on N GPUs, for each kind of activation "
        "checkpointing and several batch sizes (default: print only the memory of weights and "
        "optimizer state, for the ranks of this launch)",
    )
    plan_gpu_memory: float = option(
        80.0,
        role=LOCAL,
        parse=positive,
        metavar="GIB",
        help="with --plan-gpus: memory of each GPU, in GiB",
    )
    plan_gpu_tflops: float | None = option(
        None,
        role=LOCAL,
        parse=positive,
        help="with --plan-gpus: peak TFLOP/s of each GPU, from its data sheet, to estimate the "
        "time (default: 989 for an H100; 67 in fp32)",
    )

    log_freq: int = option(
        10,
        "--log-interval",
        aliases=("logging_steps", "logging_freq", "metrics.log_freq"),
        group="logs, checkpoints and evaluation",
        role=ALIKE,
        parse=positive_int,
        help="steps between log lines",
    )
    log_style: str = option(
        "line",
        role=LOCAL,
        choices=("line", "dict"),
        help="console format of a log step: an aligned line, or a Python dict with timers, as in "
        "the log file of each rank",
    )
    ckpt_freq: int = option(
        500,
        "--checkpoint-interval",
        aliases=("save_steps", "checkpoint_freq", "checkpoint.interval"),
        role=ALIKE,
        parse=positive_int,
        help="steps between checkpoints",
    )
    ckpt_keep: int = option(
        3,
        aliases=("save_total_limit", "checkpoint.keep_latest_k"),
        role=ALIKE,
        parse=count,
        help="keep the N newest checkpoints (2 or more; 0: all); the best one by --best-by is "
        "always kept",
    )
    ckpt_keep_every: int | None = option(
        None,
        role=LOCAL,
        parse=positive_int,
        help="also keep the checkpoints of steps that are multiples of N (default: none)",
    )
    ckpt_async: bool = option(
        True,
        role=ALIKE,
        parse=on_off,
        help="write checkpoints in the background, from copies in host memory",
    )
    ckpt_local_dir: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        help="directory on each node's own disk for additional, more frequent checkpoints. If the "
        "run resumes on the same nodes with as many ranks, it uses the newest checkpoint, from "
        "here or from the run's directory (default: none)",
    )
    ckpt_hyperpod: str | None = option(
        None,
        role=ALIKE,
        metavar="auto|URL",
        help="keep additional, more frequent checkpoints in the memory of a HyperPod cluster "
        "instead of in --ckpt-local-dir; auto finds its service (default: not used)",
    )
    ckpt_local_freq: int | None = option(
        None,
        role=ALIKE,
        parse=positive_int,
        help="steps between checkpoints in --ckpt-local-dir or --ckpt-hyperpod (default: a "
        "tenth of --ckpt-freq)",
    )
    ckpt_copy_to: str | None = option(
        None,
        role=ALIKE,
        metavar="DIR|s3://BUCKET/PREFIX",
        help="copy each checkpoint in the background to another directory or to S3, and verify the "
        "copy. A run that has lost its checkpoints is restored from the copies. s3:// needs the "
        "package s3fs and a network connection (default: no copies)",
    )
    ckpt_copy_keep: int = option(
        0,
        role=LOCAL,
        parse=count,
        help="keep the N newest copies (2 or more; 0: all); the copies for --ckpt-keep-every and "
        "of the best checkpoint by --best-by are kept too",
    )
    eval_freq: int = option(
        500,
        aliases=("eval_steps", "validation_freq", "validation.freq"),
        role=ALIKE,
        parse=count,
        help="steps between evaluations; 0: evaluate only at the end",
    )
    eval_batches: int = option(
        100,
        aliases=("validation_batches", "validation.steps"),
        role=ALIKE,
        parse=positive_int,
        help="global batches of the validation split per evaluation",
    )
    sample_prompts: Path | None = option(
        None,
        role=LOCAL,
        parse=Path,
        metavar="FILE",
        help="continue prompts while training, and write the samples to samples.jsonl: a text file "
        'with a prompt per line, or JSON Lines with "prompt" or "messages" (default: no samples)',
    )
    sample_tokens: int = option(
        64,
        role=ALIKE,
        parse=positive_int,
        help="with --sample-prompts: tokens of each sample. Each token takes a forward pass over "
        "all prompts, which gathers the weights of all ranks",
    )
    eval_suite: str = option(
        "",
        role=ALIKE,
        metavar="DIR|NAME",
        help="evaluate the model on these tasks: a directory, or small, six tasks that come with "
        "the code (default: none)",
    )
    suite_limit: int | None = option(
        None,
        role=ALIKE,
        parse=positive_int,
        help="use the first N items of each task of --eval-suite (default: all)",
    )
    best_by: str = option(
        figures.DEFAULT_SCORE,
        role=ALIKE,
        parse=figures.parse_score,
        metavar="KEY",
        help="key of metrics.jsonl that decides which checkpoint is the best: the lowest value is "
        "best for a loss, a perplexity or bits_per_byte, the highest for an accuracy "
        "(eval/TASK/accuracy)",
    )
    max_minutes: float | None = option(
        None,
        role=LOCAL,
        parse=positive,
        help="save and stop (exit code 75) after this many minutes; the same command resumes "
        "(default: no limit)",
    )
    watchdog_minutes: float = option(
        30.0,
        role=LOCAL,
        parse=non_negative,
        help="minutes after which a step counts as hung: write the stacks of all threads to logs/ "
        "and end the process; 0: never",
    )
    wandb: bool = option(
        False,
        role=LOCAL,
        parse=on_off,
        help="also log to Weights & Biases, offline, in the run's wandb/ directory (`wandb sync` "
        "uploads it)",
    )
    profile: tuple[int, int] | None = option(
        None,
        role=LOCAL,
        parse=options.span,
        metavar="START:END",
        help="steps to profile. Each rank writes a trace and a table of operations to the run's "
        "profile/ directory, and on GPUs also a memory snapshot (default: none)",
    )

    config: Path | None = option(None, role=LOCAL)  # this one and those below: as in every stage
    dry_run: bool = option(False, role=LOCAL, first="print the plan and write nothing")
    overwrite: bool = option(False, role=ALIKE)
    num_workers: int = option(1, role=LOCAL)
    no_progress: bool = option(False, role=LOCAL)
    settled_by: Mapping[str, str] = field(default_factory=dict)

    def with_values(self, settled_by: str, **values: Any) -> Config:
        """Return a copy with other values of options. settled_by: the reason for the values."""
        return replace(
            self, **values, settled_by={**self.settled_by, **dict.fromkeys(values, settled_by)}
        )

    def without_value(self, name: str) -> Config:
        """Return a copy in which a settled option is None again."""
        others = {key: reason for key, reason in self.settled_by.items() if key != name}
        changes: dict[str, Any] = {name: None, "settled_by": others}
        return replace(self, **changes)

    @property
    def has_auto_batch(self) -> bool:
        """Return whether --batch-size is `auto`, or was before it was settled."""
        return self.batch_size == AUTO or "batch_size" in self.settled_by

    @property
    def makes_model(self) -> str:
        """Return the option that creates a model from scratch, with its value; "" for none."""
        if self.config_json:
            return f"--config-json {self.config_json}"
        return f"--model-size {self.model_size}" if self.model_size else ""

    @property
    def is_synthetic(self) -> bool:
        """Return whether the run trains on synthetic tokens, the default of --bench."""
        from lib.tokens.synthetic import is_synthetic  # imports numpy, which --help does not need

        if self.bench and not self.dataset_name:
            return True
        return any(map(is_synthetic, self.dataset_name))

    @property
    def trains_lora(self) -> bool:
        """Return whether the run trains a LoRA adapter."""
        return bool(self.lora_rank or self.lora_from)

    @property
    def step_limit(self) -> int | None:
        """Return the most steps that the options allow; None if only the data ends the run."""
        if not self.steps_per_epoch or (self.max_steps and not self.num_epochs):
            return self.max_steps
        steps = self.steps_per_epoch * (self.num_epochs or 1)
        return min(steps, self.max_steps or steps)

    def values_of(self, *roles: Role) -> dict[str, Any]:
        """Return the values of the options with one of these roles, by field."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in declared.list_fields(Config)
            if entry.metadata["role"] in roles
        }

    def to_record(self) -> dict[str, Any]:
        """Return all options as plain values for config.yaml.

        Options that the model, the hardware or the memory estimate decided get their defaults, so
        that `--config` with this record decides them anew on another machine.
        """
        reopened = {
            name: default
            for name, default in (
                ("seq_length", None),
                ("precision", None),
                ("activation_checkpointing", AUTO),
                ("keep_gathered", None),
                ("shard_size", None),
                ("router_aux_loss", AUTO),
            )
            if name in self.settled_by
        }
        return options.to_plain_values(options.Options(**self.values_of(*Role) | reopened))

    def identity(self, inputs: Mapping[str, Any], global_batch: int) -> dict[str, Any]:
        """Return the options and inputs that affect a run's result, for lib/core/identity.py.

        inputs: fingerprints of model, dataset and tokenizer. global_batch: samples per step.
        """
        quiet_defaults = {
            entry.name
            for entry in declared.list_fields(Config)
            if (quiet := entry.metadata["quiet"])
            and getattr(self, entry.name)
            in (quiet if isinstance(quiet, tuple) else (entry.default,))
        }
        values = {
            name: value
            for name, value in self.values_of(RESULT).items()
            if name not in quiet_defaults
        }
        return {"options": {**values, "global_batch_size": global_batch}, "inputs": dict(inputs)}


DEFAULTS = Config()


def list_changed_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the options that have other values, as plain values.

    config.yaml records them, so that other programs can show the options of a run without knowing
    those of its version.
    """
    defaults = options.to_plain_values(DEFAULTS)
    changed = (name for name, value in values.items() if value != defaults.get(name))
    return {name: defaults.get(name) for name in changed}
