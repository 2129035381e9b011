"""Option names of other trainers, and the messages about unknown options.

Every command and every YAML file accepts a name that means the same as an option of ours. For an
option that works differently here, the error says what to type instead. For an unknown name, it
suggests an option with a similar name.
`python -m lib.core.aliases` writes the table into docs/how-to/coming-from.md.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from lib.core.errors import UsageError

SIMILAR = 0.75  # the lowest ratio of difflib for a suggestion: below, names share only some letters

SYSTEMS = {
    "offline": "an offline fine-tuning pipeline",
    "scratch": "a from-scratch FSDP2 trainer",
    "aws": "the AWS FSDP sample",
    "eks": "an EKS deployer",
    "hyperpod": "a HyperPod app",
    "trainer": "the Hugging Face Trainer",
    "axolotl": "Axolotl",
    "titan": "torchtitan",
    "megatron": "Megatron-LM",
    "earlier": "earlier versions",
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "coming-from.md"
BEGIN = "<!-- table: python -m lib.core.aliases -->\n"
END = "<!-- end of the table -->"


class Row(NamedTuple):
    """Maps option names of other trainers to an option of ours.

    option: our name; a parser without this option ignores the row. text: what to type instead of
    the other names; empty if they are accepted as aliases. names: for each system, its names for
    the option, separated by spaces.
    """

    option: str
    text: str
    names: dict[str, str]


def _alias(option: str, **names: str) -> Row:
    return Row(option, "", names)


def _advise(option: str, text: str, **names: str) -> Row:
    return Row(option, text, names)


_FLAGS = "bf16 fp16 tf32"
_OF_TEXT = "text_column text_column_name dataset_text_field"
_BATCH = "per_device_train_batch_size"
ROWS = (
    # What is trained, on what, and where it goes.
    _alias("--src-dir", offline="src_dir"),
    _alias("--data-folder", offline="data_folder"),
    _alias(
        "--model-name",
        offline="model_name",
        scratch="hf_model",
        trainer="model_name_or_path",
        axolotl="base_model",
    ),
    _advise(
        "--model-name",
        "--model-name NAME",
        trainer="config_name model",
        axolotl="base_model_config",
        titan="model.name model.flavor model.hf_assets_path",
        aws="model_type",
    ),
    _alias("--model-size", scratch="model_size"),
    _alias("--vocab-size", scratch="vocab_size", aws="vocab_size"),
    _advise(
        "--model-size",
        "--model-size SIZE, or --config-json FILE",
        trainer="config_overrides",
        aws="hidden_width num_layers num_heads num_key_value_heads intermediate_size",
    ),
    _advise(
        "--config-json",
        "--config-json FILE: the config of the model names its dropout, initial weights and "
        "rotary embedding",
        aws="resid_pdrop embd_pdrop attn_pdrop summary_first_pdrop initializer_range rotary_pct "
        "rotary_emb_base",
    ),
    _advise(
        "--model-name",
        "stage 05 takes it over: 05_export_checkpoint.py --from-dcp DIR -m MODEL --out NEW; "
        "then -m NEW",
        earlier="resume_from_foreign",
    ),
    _advise(
        "--tokenizer",
        "the model's directory contains the tokenizer; --tokenizer DIR needs "
        "--model-size or --config-json",
        trainer="tokenizer_name",
        axolotl="tokenizer_config",
        titan="model.tokenizer_path",
    ),
    _alias("--dataset-name", offline="dataset_name"),
    _advise(
        "--dataset-name",
        "--dataset-name NAME (in stage 04 a dataset that stage 02 built)",
        trainer="train_file dataset_path dataset_config_name",
        axolotl="datasets dataset_prepared_path",
        titan="training.dataset training.dataset_path",
        aws="dataset dataset_config_name dataset_path",
        hyperpod="local_dataset_path",
    ),
    _advise("--fields", "--fields NAME", trainer=_OF_TEXT, axolotl="field"),
    _advise(
        "--text-field",
        "stage 02 has --fields NAME; --text-field NAME with --streaming",
        trainer=_OF_TEXT,
        axolotl="field",
    ),
    _alias("--validation-percent", trainer="validation_split_percentage"),
    _advise("--validation-percent", "--validation-percent P", axolotl="val_set_size"),
    _advise(
        "--eval-freq",
        "stage 02 makes the validation split: --validation-percent P",
        trainer="validation_split_percentage validation_file",
        axolotl="val_set_size test_datasets",
        titan="validation.dataset",
        aws="train_split val_split",
    ),
    _alias("--experiment-name", offline="experiment_name"),
    _alias("--save-dir", offline="save_dir"),
    _alias(
        "--checkpoint-dir",
        scratch="checkpoint_dir",
        aws="checkpoint_dir",
        trainer="output_dir",
        axolotl="output_dir",
    ),
    _advise(
        "--out",
        "stage 05 takes -e DIR for the run, and --out DIR for the model that it writes",
        scratch="checkpoint_dir",
        aws="checkpoint_dir",
        trainer="output_dir",
        axolotl="output_dir",
    ),
    _advise(
        "--experiment-name",
        "--save-dir DIR and -e NAME: a run lies in DIR/NAME, its TensorBoard files in DIR/NAME/tb",
        trainer="logging_dir run_name",
        aws="tensorboard_dir",
        axolotl="wandb_name",
        titan="job.dump_folder",
    ),
    _advise("--config", "--config FILE", trainer="config_file", titan="job.config_file"),
    # Length and batch.
    _alias(
        "--num-epochs",
        offline="num_epochs",
        trainer="num_train_epochs",
        axolotl="num_epochs",
        aws="epochs",
    ),
    _alias("--steps-per-epoch", scratch="steps_per_epoch"),
    _alias(
        "--max-steps",
        trainer="max_steps",
        axolotl="max_steps",
        titan="training.steps",
        aws="max_steps max_training_steps",
        eks="max_steps",
    ),
    _alias(
        "--batch-size",
        offline="batch_size",
        scratch="batch_size",
        trainer=_BATCH,
        axolotl="micro_batch_size",
        titan="training.local_batch_size training.batch_size",
        aws="train_batch_size",
    ),
    _advise(
        "--batch-size",
        "--batch-size N, for validation too",
        trainer="per_device_eval_batch_size",
        axolotl="eval_batch_size",
        aws="val_batch_size",
    ),
    _alias("--global-batch-size", titan="training.global_batch_size"),
    _alias(
        "--grad-accum-steps",
        trainer="gradient_accumulation_steps",
        axolotl="gradient_accumulation_steps",
        titan="training.gradient_accumulation_steps",
    ),
    _alias(
        "--seq-length",
        offline="seq_length",
        trainer="max_seq_length max_length block_size model_max_length",
        axolotl="sequence_len",
        titan="training.seq_len",
        aws="max_context_width",
    ),
    _alias("--chat-template", trainer="chat_template_path"),
    _advise(
        "--chat-template",
        "--chat-template FILE, to replace that of the model "
        "(chat_templates/ contains one for ChatML)",
        axolotl="chat_template_jinja",
    ),
    _advise(
        "--train-on",
        "--train-on assistant (the default: all answers), last or all",
        trainer="assistant_only_loss completion_only_loss",
        axolotl="train_on_inputs roles_to_train train_on_eos train_on_eot",
    ),
    # Adapters.
    _alias("--lora-rank", trainer="lora_r", axolotl="lora_r"),
    _advise(
        "--lora-rank",
        "--lora-rank N trains adapters of that rank",
        trainer="use_peft",
        axolotl="adapter",
    ),
    _advise(
        "--lora-rank",
        "no quantised weights: the model stays in bf16, sharded over all ranks; "
        "--cpu-offload on if it does not fit",
        trainer="load_in_4bit load_in_8bit bnb_4bit_quant_type",
        axolotl="load_in_4bit load_in_8bit",
    ),
    _advise(
        "--lora-targets",
        "--lora-targets all-linear, attention, mlp or 'q_proj|v_proj'",
        trainer="lora_target_modules",
        axolotl="lora_target_modules lora_target_linear",
    ),
    _advise(
        "--lora-targets",
        "only plain LoRA on linear layers of the blocks; no other module is trained",
        trainer="use_dora lora_modules_to_save",
        axolotl="peft_use_dora lora_modules_to_save",
    ),
    _advise("--lora-from", "--lora-from DIR", axolotl="lora_model_dir"),
    _advise("--lora-rslora", "--lora-rslora on", trainer="use_rslora", axolotl="peft_use_rslora"),
    _alias("--packing", axolotl="sample_packing"),
    _advise(
        "--packing",
        "--packing documents, none, or concat (the default for text)",
        axolotl="pad_to_sequence_len eval_sample_packing",
    ),
    # Optimizer.
    _alias(
        "--lr",
        offline="lr",
        scratch="max_lr",
        trainer="learning_rate",
        axolotl="learning_rate",
        titan="optimizer.lr",
        aws="lr",
    ),
    _alias("--min-lr", aws="min_lr"),
    _advise("--min-lr", "--min-lr X", titan="lr_scheduler.min_lr_factor lr_scheduler.lr_min"),
    _advise(
        "--lr-scheduler",
        "--lr-scheduler cosine|linear|constant|wsd, down to --min-lr X",
        trainer="lr_scheduler_type",
        titan="lr_scheduler.decay_type lr_scheduler.decay_ratio",
        aws="lr_decay_style plateau",
    ),
    _advise(
        "--max-steps",
        "leave it out: the learning rate falls until the last step, which --max-steps N sets",
        aws="lr_decay_iters",
    ),
    _alias(
        "--warmup-steps",
        trainer="warmup_steps",
        axolotl="warmup_steps",
        titan="lr_scheduler.warmup_steps",
    ),
    _advise(
        "--warmup-steps",
        "--warmup-steps N, a number of steps and not a share",
        trainer="warmup_ratio",
        axolotl="warmup_ratio",
        aws="warmup",
    ),
    _alias(
        "--weight-decay",
        trainer="weight_decay",
        axolotl="weight_decay",
        titan="optimizer.weight_decay",
        aws="weight_decay",
    ),
    _alias(
        "--beta1", trainer="adam_beta1", axolotl="adam_beta1", titan="optimizer.beta1", aws="beta1"
    ),
    _alias(
        "--beta2", trainer="adam_beta2", axolotl="adam_beta2", titan="optimizer.beta2", aws="beta2"
    ),
    _alias(
        "--grad-clip",
        trainer="max_grad_norm",
        axolotl="max_grad_norm",
        titan="training.max_norm",
        aws="grad_clip",
    ),
    _advise("--optimizer", "--optimizer NAME", trainer="optim", titan="optimizer.name"),
    _alias(
        "--seed",
        offline="seed",
        trainer="seed",
        axolotl="seed",
        aws="seed",
        titan="training.seed debug.seed",
    ),
    _advise("--seed", "--seed N, which also decides the order of samples", trainer="data_seed"),
    _advise("--seed", "leave it out: --seed N holds for all ranks", aws="same_seed"),
    _advise(
        "--router-aux-loss",
        "--router-aux-loss X; auto follows output_router_logits in the model's config.json",
        trainer="router_aux_loss_coef output_router_logits",
        axolotl="router_aux_loss_coef output_router_logits",
        megatron="moe_aux_loss_coeff moe_router_load_balancing_type moe_router_bias_update_rate",
    ),
    # Precision, speed, memory.
    _alias("--precision", scratch="mixed_precision"),
    _advise(
        "--precision",
        "--precision bf16|fp16|fp32|fp8 (default: bf16 if the hardware supports it)",
        trainer=f"{_FLAGS} torch_dtype dtype",
        axolotl=f"{_FLAGS} bfloat16 float16",
        titan="training.mixed_precision_param training.dtype",
        aws="bf16",
    ),
    _alias(
        "--activation-checkpointing",
        trainer="gradient_checkpointing",
        axolotl="gradient_checkpointing",
        aws="activation_checkpointing",
    ),
    _advise(
        "--activation-checkpointing",
        "--activation-checkpointing selective, or full",
        titan="activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        aws="offload_activations activation_loading_horizon",
    ),
    _alias("--attention", scratch="use_flash_attn"),
    _advise(
        "--attention",
        "--attention flash, or auto|sdpa|varlen|flash_attention_2|flex",
        trainer="attn_implementation",
        axolotl="flash_attention sdp_attention xformers_attention flex_attention",
        titan="model.use_flex_attn",
    ),
    _advise(
        "--deterministic",
        "--deterministic on",
        trainer="full_determinism",
        titan="debug.deterministic training.deterministic",
    ),
    _advise(
        "--compile",
        "--compile auto|on|off",
        trainer="torch_compile",
        axolotl="torch_compile",
        titan="training.compile compile.enable",
    ),
    _alias("--cpu-offload", offline="cpu_offload", aws="cpu_offload"),
    _advise("--cpu-offload", "--cpu-offload on", titan="training.enable_cpu_offload"),
    _advise(
        "--shard-size",
        "FSDP2 is always on; --shard-size N for replicas of N ranks (HSDP)",
        trainer="fsdp fsdp_config deepspeed",
        axolotl="fsdp fsdp_config deepspeed",
        titan="parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree",
        aws="sharding_strategy",
    ),
    _advise(
        "--keep-gathered",
        "leave it out: FSDP2 always limits all-gathers; --keep-gathered off saves memory",
        aws="limit_all_gathers",
    ),
    _advise(
        "--keep-gathered",
        "--keep-gathered auto|on|off",
        titan="parallelism.fsdp_reshard_after_forward",
    ),
    _advise("--device", "--device cpu", trainer="use_cpu no_cuda"),
    _advise(
        "--num-workers",
        "--num-workers N",
        axolotl="dataset_processes dataloader_num_workers",
        trainer="dataloader_num_workers preprocessing_num_workers",
    ),
    _advise(
        "--plan-gpus",
        "leave it out: --dry-run --plan-gpus N prints memory and time, and no interval of saves",
        earlier="plan_mtbf_hours plan_write_gbps plan_step_seconds",
    ),
    # Checkpoints, logs, evaluation.
    _advise(
        "--eval-freq",
        "--eval-freq N: samples and tasks follow it",
        earlier="sample_freq suite_freq",
    ),
    _advise(
        "--from-scratch",
        "lm-eval scores an export with published tasks: docs/how-to/other-programs.md",
        earlier="eval_wheel suite_name",
    ),
    _advise(
        "--once",
        "the report of several runs compares them: docs/how-to/report.md",
        earlier="compare",
    ),
    _advise(
        "--cache-dir",
        "leave it out, or put the cache on a local disk; pread is used where mmap fails",
        earlier="token_reads",
    ),
    _alias(
        "--ckpt-freq",
        offline="ckpt_freq",
        scratch="checkpoint_interval",
        trainer="save_steps",
        axolotl="save_steps",
        titan="checkpoint.interval",
        aws="checkpoint_freq",
    ),
    _alias(
        "--ckpt-keep",
        trainer="save_total_limit",
        axolotl="save_total_limit",
        titan="checkpoint.keep_latest_k",
    ),
    _advise("--ckpt-async", "--ckpt-async on (the default)", titan="checkpoint.async_mode"),
    _advise(
        "--resume",
        "run the same command again to resume; --resume PATH resumes from one checkpoint",
        trainer="resume_from_checkpoint",
        axolotl="resume_from_checkpoint auto_resume_from_checkpoints",
        titan="checkpoint.load_step checkpoint.folder checkpoint.enable "
        "checkpoint.enable_checkpoint",
        aws="resume_from_checkpoint",
    ),
    _advise("--overwrite", "--overwrite", trainer="overwrite_output_dir overwrite_cache"),
    _alias(
        "--log-freq",
        offline="log_freq",
        scratch="log_interval",
        trainer="logging_steps",
        axolotl="logging_steps",
        titan="metrics.log_freq",
        aws="logging_freq",
    ),
    _alias(
        "--eval-freq",
        trainer="eval_steps",
        axolotl="eval_steps",
        titan="validation.freq",
        aws="validation_freq",
    ),
    _advise(
        "--eval-freq",
        "--eval-freq N (0: only at the end)",
        trainer="eval_strategy evaluation_strategy do_eval",
        axolotl="evals_per_epoch",
        titan="validation.enable",
    ),
    _alias("--eval-batches", titan="validation.steps", aws="validation_batches"),
    _advise("--eval-batches", "--eval-batches N (global batches)", trainer="max_eval_samples"),
    _advise(
        "--wandb",
        "--wandb on",
        trainer="report_to",
        axolotl="wandb_project wandb_mode",
        titan="metrics.enable_wandb",
    ),
    _advise(
        "--profile",
        "--profile START:END",
        titan="profiling.enable_profiling profiling.profile_freq",
    ),
    # The Hub.
    _alias("--token", trainer="hub_token", eks="hf_token"),
    _advise("--token", "--token TOKEN, or HF_TOKEN", trainer="use_auth_token"),
    _alias("--revision", trainer="model_revision", axolotl="revision_of_model"),
    # A cluster.
    _alias("--nodes", eks="num_nodes", hyperpod="node_count"),
    _alias("--gpus-per-node", eks="gpu_per_node", hyperpod="tasks_per_node accelerators"),
    _alias("--efa-per-node", hyperpod="efa_interfaces"),
    _alias("--image", eks="image_uri", hyperpod="image"),
    _alias("--instance-type", eks="instance_type", hyperpod="instance_type"),
    _alias("--job-name", eks="job_name", hyperpod="job_name"),
    _alias("--namespace", hyperpod="namespace"),
    _alias("--service-account", hyperpod="service_account_name"),
    _alias("--max-restarts", hyperpod="max_retry"),
    _advise("--kind", "the options of stage 04, after `--`", hyperpod="command args"),
    _alias("--cluster-name", eks="cluster_name"),
    _alias("--region", eks="region"),
    _alias("--monitor", eks="monitor"),
    _advise(
        "--attempts",
        "--attempts 1 for a single submission; in Python also auto_retry=False",
        eks="auto_retry",
    ),
    _advise(
        "--kind",
        "--kind hyperpod for the operator of HyperPod; kubectl submits every kind",
        eks="use_hyperpod_cli",
    ),
    _advise(
        "--code-dir",
        "leave it out: the Python of the image starts the ranks",
        eks="torchrun_path",
    ),
    _alias("--validate-components", eks="validate_components"),
    _alias("--auto-fix", eks="auto_fix"),
    _advise(
        "--cluster-name",
        "no cluster is created, since it costs money: launch/kubernetes.py setup prints the "
        "commands that create one, with their costs",
        eks="create_if_missing infrastructure_type",
    ),
    _alias("--dockerfile", eks="dockerfile"),
    _alias("--tag", eks="tag"),
    _alias("--base-image", eks="base_image"),
    _alias("--max-attempts", eks="max_attempts"),
    _advise(
        "--max-minutes",
        "the launchers have it, before their `--`: launch/single_node.sh --on-end COMMAND -- …",
        earlier="on_end on_end_seconds",
    ),
    _advise("--dockerfile", "leave it out: docker's output is always shown", eks="verbose"),
)


def find_option(name: str, ours: Collection[str]) -> str:
    """Return our option for an alias with the same meaning; empty if there is none.

    name: as typed, or without leading dashes. ours: the options of the parser.
    """
    plain_name = _normalize_name(name)
    return next(
        (
            row.option
            for row in ROWS
            if not row.text and row.option in ours and plain_name in _list_names(row)
        ),
        "",
    )


def find_advice(name: str, ours: Collection[str]) -> str:
    """Return what to type instead of another trainer's option; empty for an unknown name.

    name, ours: as in `find_option`.
    """
    plain_name = _normalize_name(name)
    for row in ROWS:
        places = [
            SYSTEMS[system] for system, names in row.names.items() if plain_name in names.split()
        ]
        if row.text and places and row.option in ours:
            return f"{row.text} ({plain_name} is the name in {' and '.join(places)})"
    return ""


def is_gone(name: str) -> bool:
    """Return whether an option of this name existed in an earlier version."""
    return any(_normalize_name(name) in row.names.get("earlier", "").split() for row in ROWS)


def spellings(options: Collection[str]) -> list[str]:
    """Return all names that commands accept for the given options, our own names first."""
    names = [
        name for row in ROWS if not row.text and row.option in options for name in _list_names(row)
    ]
    long = [*(option[2:] for option in options if option.startswith("--")), *names]
    both = [f"--{name.replace(*way)}" for name in long for way in (("_", "-"), ("-", "_"))]
    return list(dict.fromkeys([*options, *both]))


def make_table() -> str:
    """Return all rows as a table in Markdown."""
    lines = ["| here | what to type | names there |", "|---|---|---|"]
    lines += [
        f"| `{row.option}` | {row.text.replace('|', chr(92) + '|') or 'the names there'} | "
        + "; ".join(
            f"{SYSTEMS[system]}: " + ", ".join(f"`{name}`" for name in names.split())
            for system, names in row.names.items()
        )
        + " |"
        for row in ROWS
    ]
    return "\n".join(lines) + "\n"


def _list_names(row: Row) -> Iterator[str]:
    return (name for names in row.names.values() for name in names.split())


def _normalize_name(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def suggest_option(flag: str, ours: Collection[str]) -> tuple[str, str]:
    """Return the text after `unknown option FLAG` in an error, and a hint; either may be empty.

    ours: the options of the parser.
    """
    if text := find_advice(flag, ours):
        return "", text
    options = {option.lstrip("-"): option for option in ours if option.startswith("--")}
    words = set(flag.lstrip("-").split("-"))
    near = [name for name in options if words <= set(name.split("-"))]  # --epochs
    if len(near) != 1:
        near = difflib.get_close_matches(flag.lstrip("-"), options, n=1, cutoff=SIMILAR)
    if not near:  # it may be similar to an alias
        options = {name.lstrip("-"): name for name in spellings(ours)}
        near = difflib.get_close_matches(flag.lstrip("-"), options, n=1, cutoff=SIMILAR)
    return f"; the nearest is {options[near[0]]}" if near else "", ""


def unknown_option_errors(words: Sequence[str], ours: Collection[str]) -> Iterator[UsageError]:
    """Yield an error for each option among the words that a parser did not know.

    If the first word is not an option, the only error is about that word.
    """
    if not words[0].startswith("-"):
        yield UsageError(f"unexpected argument {words[0]!r}")
        return
    for flag in dict.fromkeys(
        word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)
    ):
        near, hint = suggest_option(flag, ours)
        yield UsageError(f"unknown option {flag}{near}", hint=hint)


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + make_table() + END + rest.partition(END)[2], encoding="utf-8")
