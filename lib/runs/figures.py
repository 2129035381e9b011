"""Define the keys of metrics.jsonl, state.json and metrics.prom: units, meanings, statuses."""

from __future__ import annotations

import argparse
import re
from enum import Enum
from typing import NamedTuple

from lib.core.errors import EXIT_DISK_FULL, EXIT_DONE, EXIT_PREEMPTED


class Figure(NamedTuple):
    """Describes a key of metrics.jsonl or state.json.

    unit: empty if the value has none. prometheus: name of the gauge in metrics.prom without
    `llm_train_`; empty if that file omits the value.
    """

    unit: str
    meaning: str
    prometheus: str = ""


# In the order in which a row contains them. NN stands for the number of a layer, DATASET for the
# name of a dataset, TASK for that of a task, NAME for a source of text, a dataset or a task.
METRICS = {
    "step": Figure("", "optimizer steps done", "step"),
    "time": Figure(
        "UTC",
        "when the host ended the step; a GPU may be behind by less than one step",
        "row_timestamp_seconds",
    ),
    "epoch": Figure(
        "",
        "passes over the data so far; with `--streaming`, passes of rank 0 over its part of the "
        "files",
        "epoch",
    ),
    "train/loss": Figure(
        "nats per token",
        "mean over the label tokens of this step on all ranks; 0 if the step has none, which can "
        "happen with a chat dataset",
        "loss",
    ),
    "train/loss_mean": Figure(
        "nats per token",
        "mean of `train/loss` over the window; the console, the progress bar and the line in "
        "`loss.png` show this value",
        "loss_mean",
    ),
    "train/z_loss": Figure(
        "",
        "z-loss of this step, X times the mean of (log-sum-exp of the logits)² over its label "
        "tokens on all ranks, not part of `train/loss`; with `--z-loss`",
        "z_loss",
    ),
    "train/grad_norm": Figure(
        "", "global gradient norm of this step, before clipping", "gradient_norm"
    ),
    "train/learning_rate": Figure("", "learning rate of this step", "learning_rate"),
    "train/tokens_seen": Figure("tokens", "tokens of all launches, without padding", "seen_tokens"),
    "train/router_aux_loss": Figure(
        "",
        "load-balancing loss of this step before its coefficient, not part of `train/loss`; with "
        "`--router-aux-loss`",
        "router_aux_loss",
    ),
    "experts/max_load": Figure(
        "× mean", "largest `experts/layer_NN/max_load`", "experts_max_load_ratio"
    ),
    "experts/layer_NN/max_load": Figure(
        "× mean",
        "load of the layer's fullest expert in the window, relative to the mean load",
        "experts_layer_max_load_ratio",
    ),
    "experts/starved": Figure(
        "share", "mean of `experts/layer_NN/starved`", "experts_starved_ratio"
    ),
    "experts/layer_NN/starved": Figure(
        "share",
        "experts of the layer with less than a tenth of the mean load in the window",
        "experts_layer_starved_ratio",
    ),
    "perf/tokens_per_sec": Figure(
        "tokens/s",
        "tokens of a step on all ranks, padding included, ÷ `time/total`",
        "tokens_per_second",
    ),
    "perf/tokens_per_sec_per_device": Figure(
        "tokens/s", "`perf/tokens_per_sec` ÷ ranks", "device_tokens_per_second"
    ),
    "perf/label_tokens_per_sec": Figure(
        "tokens/s", "label tokens of the window on all ranks ÷ its time", "label_tokens_per_second"
    ),
    "perf/samples_per_sec": Figure(
        "samples/s",
        "samples of a step on all ranks (the global batch) ÷ `time/total`",
        "samples_per_second",
    ),
    "perf/tflops": Figure(
        "TFLOP/s",
        "operations of one device in the window, counted as 6 N + 12 L H Q T per token (4 N for "
        "frozen weights). T is the sequence length. Of packed documents, the squares of their "
        "lengths count instead of the square of T",
        "device_flop_per_second",
    ),
    "perf/mfu": Figure(
        "share",
        "`perf/tflops` ÷ the peak of the GPU, which the rank log contains; absent on a CPU",
        "mfu_ratio",
    ),
    "perf/run_tokens_per_sec": Figure(
        "tokens/s",
        "tokens of a step on all ranks, padding included, ÷ mean step time of the launch, with "
        "evaluation and saves; from the second step on",
        "launch_tokens_per_second",
    ),
    "perf/eta_sec": Figure(
        "s",
        "remaining steps × mean step time of the launch, with evaluation and saves; absent in the "
        "first and the last row",
        "remaining_seconds",
    ),
    "time/data": Figure(
        "ms per step", "mean time to get the batches, over the window", "step_data_seconds"
    ),
    "time/forward": Figure(
        "ms per step", "mean time of the forward passes", "step_forward_seconds"
    ),
    "time/backward": Figure(
        "ms per step", "mean time of the backward passes", "step_backward_seconds"
    ),
    "time/update": Figure(
        "ms per step", "mean time of clipping and the optimizer", "step_update_seconds"
    ),
    "time/optimizer": Figure(
        "ms per step",
        "mean time of the optimizer, a part of `time/update`",
        "step_optimizer_seconds",
    ),
    "time/total": Figure(
        "ms per step",
        "wall time of the window ÷ its steps, on a GPU by the GPU's clock, without evaluation and "
        "waits for saves",
        "step_seconds",
    ),
    "perf/loader_share": Figure(
        "share",
        "share of the step time spent waiting for data; with `--streaming`",
        "loader_wait_ratio",
    ),
    "perf/loader_tokens_per_sec_per_device": Figure(
        "tokens/s",
        "tokens that the workers of this rank could produce; with `--streaming`",
        "loader_device_tokens_per_second",
    ),
    "memory/current_gib": Figure("GiB", "memory in use, rank 0", "memory_in_use_bytes"),
    "memory/reserved_gib": Figure(
        "GiB", "memory held by the allocator, rank 0", "memory_reserved_bytes"
    ),
    "memory/total_gib": Figure("GiB", "memory of the device, rank 0", "memory_size_bytes"),
    "memory/peak_gib": Figure(
        "GiB",
        "largest memory in use since this launch allocated the model (a GPU's allocator; resident "
        "memory on a CPU), rank 0",
        "memory_peak_bytes",
    ),
    "memory/window_peak_gib": Figure(
        "GiB",
        "the peak since the previous row, with evaluation and saves. Some Linux kernels do not let "
        "a process reset its peak; a CPU run then reports the peak of the process",
        "memory_window_peak_bytes",
    ),
    "memory/alloc_retries": Figure(
        "",
        "how often the allocator of a GPU had to return cached memory since the launch began, "
        "rank 0; not on a CPU",
        "memory_allocation_retries",
    ),
    "perf/slowest_rank": Figure(
        "rank", "the rank that takes longest for data and optimizer", "slowest_rank"
    ),
    "perf/slowest_ratio": Figure(
        "× median",
        "time of that rank for data and optimizer, relative to the median rank",
        "slowest_rank_ratio",
    ),
    "memory/max_peak_gib": Figure(
        "GiB", "largest `memory/peak_gib` of all ranks", "memory_max_peak_bytes"
    ),
    "memory/max_peak_rank": Figure("rank", "the rank with that peak", "memory_max_peak_rank"),
    "eval/loss": Figure(
        "nats per token",
        "mean over the label tokens of the first `--eval-batches` global batches of the "
        "validation split; with several datasets, their weighted mean",
        "validation_loss",
    ),
    "eval/perplexity": Figure("", "exp(`eval/loss`)", "validation_perplexity"),
    "eval/loss/DATASET": Figure(
        "nats per token",
        "validation loss of one dataset; with several datasets",
        "dataset_validation_loss",
    ),
    "eval/bits_per_byte": Figure(
        "bits per byte",
        "Σ nats of these label tokens ÷ (ln 2 × Σ bytes of the text that they stand for); "
        "special tokens add neither nats nor bytes. Absent for conversations",
        "validation_bits_per_byte",
    ),
    "eval/NAME/bits_per_byte": Figure(
        "bits per byte",
        "the same for one source of the text (`--keep-source` of stage 02), or with several "
        "datasets for one dataset; for a task of `--eval-suite`, the negative log-likelihood of "
        "its right answers ÷ their UTF-8 bytes",
        "part_bits_per_byte",
    ),
    "eval/TASK/accuracy": Figure(
        "share",
        "items of a task of `--eval-suite` whose right choice is the likeliest",
        "task_accuracy_ratio",
    ),
    "eval/TASK/accuracy_per_char": Figure(
        "share",
        "the same, with the log-likelihood of a choice ÷ its characters",
        "task_accuracy_per_char_ratio",
    ),
    "eval/TASK/accuracy_per_token": Figure(
        "share",
        "the same, with the log-likelihood of a choice ÷ its tokens",
        "task_accuracy_per_token_ratio",
    ),
}


class Status(str, Enum):
    """The status of a run in state.json. After a kill, the file still says RUNNING."""

    RUNNING = "running"
    COMPLETE = "complete"
    PREEMPTED = "preempted"
    FAILED = "failed"
    DISK_FULL = "disk_full"

    __str__ = str.__str__  # the value, also in f-strings; those of Enum depend on the Python


# The exit codes of launches that ended with these statuses; a failed one has any other code.
EXIT_CODES = {
    Status.COMPLETE: EXIT_DONE,
    Status.PREEMPTED: EXIT_PREEMPTED,
    Status.DISK_FULL: EXIT_DISK_FULL,
}

STATE = {
    "status": Figure(
        "",
        "`running` (also after a kill), `complete`, `preempted`, `failed` or `disk_full`",
        "status",
    ),
    "step": Figure("", "optimizer steps done"),
    "global_step": Figure("", "the value of `step`, under the name that other trainers use"),
    "epoch": Figure(
        "",
        "passes over the data; with `--streaming`, passes of rank 0 over its part of the files, "
        "in whole pieces of files",
    ),
    "total_steps": Figure("", "steps of the whole run", "planned_steps"),
    "tokens": Figure("tokens", "tokens of all launches, without padding"),
    "sample_cursor": Figure("samples", "samples read so far"),
    "samples": Figure("samples", "samples in an epoch"),
    "memory_estimate_gib": Figure(
        "GiB",
        "estimated memory per rank; null if there is no estimate, or not yet",
    ),
    "checkpoints": Figure(
        "", "steps of the complete checkpoints (in metrics.prom: the newest)", "checkpoint_step"
    ),
    "copied": Figure(
        "",
        "step of the newest complete copy, null if there is none; with `--ckpt-copy-to`",
        "copied_checkpoint_step",
    ),
    "copy_error": Figure(
        "", "why the last copy failed, empty if it did not; with `--ckpt-copy-to`"
    ),
    "updated": Figure("UTC", "when the file was written", "state_timestamp_seconds"),
}


DEFAULT_SCORE = "eval/loss"
_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")
_HIGHER_IS_BETTER = ("accuracy", "accuracy_per_char", "accuracy_per_token")


def parse_score(key: str) -> str:
    """Return a key by which checkpoints can be compared. Raises ArgumentTypeError otherwise."""
    if is_lower_better(key) is None:
        raise argparse.ArgumentTypeError(
            f"{key!r} is no figure of an evaluation: expected eval/loss, eval/loss/DATASET, or "
            f"eval/NAME/ and one of {', '.join((*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER))}"
        )
    return key


def is_lower_better(key: str) -> bool | None:
    """Return whether a lower value of an evaluation's figure is better, None for other keys."""
    parts = key.split("/")
    if parts[0] != "eval" or len(parts) < 2 or not all(parts):
        return None
    if parts[1] in _LOWER_IS_BETTER or parts[-1] in _LOWER_IS_BETTER:
        return True
    return False if len(parts) > 2 and parts[-1] in _HIGHER_IS_BETTER else None


def documented_name(key: str) -> str:
    """Return the key of METRICS under which a key of a row is documented."""
    key = re.sub(r"/layer_\d+/", "/layer_NN/", key)
    if key.startswith("eval/loss/"):
        return "eval/loss/DATASET"
    if re.fullmatch(r"eval/.+/bits_per_byte", key):
        return "eval/NAME/bits_per_byte"
    return re.sub(r"^eval/[^/]+/", "eval/TASK/", key)
