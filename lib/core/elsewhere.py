"""Options of other trainers, and what to type here instead.

`trainer` is the Hugging Face Trainer with its example scripts, `axolotl` the YAML of Axolotl,
`titan` torchtitan, `aws` the FSDP sample of awsome-distributed-training. The error for an unknown
option or YAML key looks here, in every stage, before it looks for a similar name.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

_FULL_NAMES = {"trainer": "the Hugging Face Trainer", "axolotl": "Axolotl", "titan": "torchtitan",
               "aws": "the AWS FSDP sample"}


class Row(NamedTuple):
    """option: ours; a parser without it has no use for the row. text: what to type.

    trainer, axolotl, titan, aws: the names there, with spaces between.
    """

    option: str
    text: str
    trainer: str = ""
    axolotl: str = ""
    titan: str = ""
    aws: str = ""


ROWS = (
    # What is trained, on what, and where it goes.
    Row("--model-name", "--model-name NAME", "model_name_or_path config_name model",
        "base_model base_model_config", "model.name model.flavor model.hf_assets_path",
        "model_type"),
    Row("--model-size", "--from-scratch --model-size SIZE, or stage 03 with --config-json FILE",
        "config_overrides", "", "",
        "hidden_width num_layers num_heads num_key_value_heads intermediate_size"),
    Row("--tokenizer", "a model's directory holds its tokenizer; --tokenizer DIR only goes with "
        "--from-scratch", "tokenizer_name", "tokenizer_config", "model.tokenizer_path"),
    Row("--dataset-name", "--dataset-name NAME (in stage 04 a dataset that stage 02 made)",
        "train_file dataset_path dataset_config_name", "datasets dataset_prepared_path",
        "training.dataset training.dataset_path", "dataset dataset_config_name dataset_path"),
    Row("--fields", "--fields NAME", "text_column text_column_name dataset_text_field",
        "field"),
    Row("--text-field", "stage 02 has --fields NAME; --text-field NAME with --streaming",
        "text_column text_column_name dataset_text_field", "field"),
    Row("--validation-percent", "--validation-percent P", "validation_split_percentage",
        "val_set_size"),
    Row("--eval-freq", "stage 02 makes the validation split: --validation-percent P",
        "validation_split_percentage validation_file", "val_set_size test_datasets",
        "validation.dataset"),
    Row("--experiment-name", "--save-dir DIR and -e NAME: a run lies in DIR/NAME",
        "output_dir logging_dir run_name", "output_dir wandb_name", "job.dump_folder",
        "checkpoint_dir"),
    Row("--config", "--config FILE", "config_file", "", "job.config_file"),
    # Length and batch.
    Row("--num-epochs", "--num-epochs N", "num_train_epochs", "", "", "epochs"),
    Row("--max-steps", "--max-steps N", "", "", "training.steps"),
    Row("--batch-size", "--batch-size N (per process), or auto", "per_device_train_batch_size",
        "micro_batch_size", "training.local_batch_size training.batch_size", "train_batch_size"),
    Row("--global-batch-size", "--global-batch-size N (samples per step, all ranks)", "",
        "", "training.global_batch_size"),
    Row("--grad-accum-steps", "--grad-accum-steps N, or --global-batch-size N",
        "gradient_accumulation_steps", "gradient_accumulation_steps",
        "training.gradient_accumulation_steps"),
    Row("--seq-length", "--seq-length N", "max_seq_length max_length block_size model_max_length",
        "sequence_len", "training.seq_len", "max_context_width"),
    Row("--packing", "--packing documents, or concat (the default)", "",
        "sample_packing pad_to_sequence_len eval_sample_packing"),
    # Optimizer.
    Row("--lr", "--lr X", "learning_rate", "learning_rate", "optimizer.lr"),
    Row("--min-lr", "--min-lr X", "", "", "lr_scheduler.min_lr_factor lr_scheduler.lr_min"),
    Row("--lr-scheduler", "--lr-scheduler cosine|linear|constant|wsd", "lr_scheduler_type", "",
        "lr_scheduler.decay_type lr_scheduler.decay_ratio",
        "lr_decay_style lr_decay_iters plateau"),
    Row("--warmup-steps", "--warmup-steps N", "warmup_ratio", "warmup_ratio",
        "lr_scheduler.warmup_steps", "warmup"),
    Row("--weight-decay", "--weight-decay X", "", "", "optimizer.weight_decay"),
    Row("--beta1", "--beta1 X", "adam_beta1", "adam_beta1", "optimizer.beta1"),
    Row("--beta2", "--beta2 X", "adam_beta2", "adam_beta2", "optimizer.beta2"),
    Row("--grad-clip", "--grad-clip X", "max_grad_norm", "max_grad_norm", "training.max_norm"),
    Row("--optimizer", "--optimizer adamw|adamw8bit", "optim", "", "optimizer.name"),
    Row("--seed", "--seed N", "data_seed", "", "training.seed debug.seed"),
    # Precision, speed, memory.
    Row("--precision", "--precision bf16|fp16|fp32|fp8 (default: what the hardware computes in)",
        "bf16 fp16 tf32 torch_dtype dtype", "bf16 fp16 tf32 bfloat16 float16",
        "training.mixed_precision_param training.dtype", "bf16"),
    Row("--activation-checkpointing", "--activation-checkpointing selective, or full",
        "gradient_checkpointing", "gradient_checkpointing",
        "activation_checkpoint.mode activation_checkpoint.selective_ac_option",
        "offload_activations"),
    Row("--attention", "--attention auto|sdpa|varlen|flash_attention_2|flex",
        "attn_implementation", "flash_attention sdp_attention xformers_attention flex_attention",
        "model.use_flex_attn"),
    Row("--deterministic", "--deterministic on", "full_determinism", "",
        "debug.deterministic training.deterministic"),
    Row("--compile", "--compile auto|on|off", "torch_compile", "torch_compile",
        "training.compile compile.enable"),
    Row("--cpu-offload", "--cpu-offload on", "", "", "training.enable_cpu_offload"),
    Row("--shard-size", "FSDP2 is always on; --shard-size N for replicas of N ranks (HSDP)",
        "fsdp fsdp_config deepspeed", "fsdp fsdp_config deepspeed",
        "parallelism.data_parallel_shard_degree parallelism.data_parallel_replicate_degree",
        "sharding_strategy"),
    Row("--num-workers", "--num-workers N", "dataloader_num_workers preprocessing_num_workers",
        "dataset_processes dataloader_num_workers"),
    # Checkpoints, logs, evaluation.
    Row("--ckpt-freq", "--ckpt-freq N", "save_steps", "save_steps", "checkpoint.interval",
        "checkpoint_freq"),
    Row("--ckpt-keep", "--ckpt-keep N", "save_total_limit", "save_total_limit",
        "checkpoint.keep_latest_k"),
    Row("--ckpt-async", "--ckpt-async on (the default)", "", "", "checkpoint.async_mode"),
    Row("--resume", "run the same command again to resume; --resume PATH takes one checkpoint",
        "resume_from_checkpoint", "resume_from_checkpoint auto_resume_from_checkpoints",
        "checkpoint.load_step checkpoint.folder checkpoint.enable checkpoint.enable_checkpoint",
        "resume_from_checkpoint"),
    Row("--overwrite", "--overwrite", "overwrite_output_dir overwrite_cache"),
    Row("--log-freq", "--log-freq N", "logging_steps", "logging_steps", "metrics.log_freq",
        "logging_freq"),
    Row("--eval-freq", "--eval-freq N", "eval_steps eval_strategy evaluation_strategy do_eval",
        "eval_steps evals_per_epoch", "validation.freq validation.enable", "validation_freq"),
    Row("--eval-batches", "--eval-batches N (global batches)", "max_eval_samples", "",
        "validation.steps", "validation_batches"),
    Row("--wandb", "--wandb on", "report_to", "wandb_project wandb_mode",
        "metrics.enable_wandb"),
    Row("--profile", "--profile START:END", "", "",
        "profiling.enable_profiling profiling.profile_freq"),
    # The Hub.
    Row("--token", "--token TOKEN, or HF_TOKEN", "hub_token use_auth_token"),
    Row("--revision", "--revision R", "model_revision", "revision_of_model"),
)


def advice(name: str, ours: Collection[str]) -> str:
    """Return what to type for the option of another trainer, empty for a name of none.

    name: without dashes in front, `-` or `_` between its words. ours: the options of the parser.
    """
    wanted = name.replace("-", "_")
    for row in ROWS:
        places = [full for short, full in _FULL_NAMES.items()
                  if wanted in getattr(row, short).split()]
        if places and row.option in ours:
            return f"{row.text} ({wanted} is the name in {' and '.join(places)})"
    return ""
