"""Define the units and meanings of the keys of metrics.jsonl and state.json."""

from __future__ import annotations

import re
from typing import NamedTuple


class Figure(NamedTuple):
    """Describes a key of metrics.jsonl or state.json. unit: empty if the value has none."""

    unit: str
    meaning: str


# In the order in which a row contains them. NN stands for the number of a layer, DATASET for the
# name of a dataset.
METRICS = {
    "step": Figure("", "optimizer steps done"),
    "time": Figure(
        "UTC", "when the host ended the step; a GPU may be behind by less than one step"
    ),
    "epoch": Figure(
        "",
        "passes over the data until then; with `--streaming`, passes of rank 0 over its part of "
        "the files",
    ),
    "train/loss": Figure(
        "nats per token",
        "mean over the label tokens of this step on all ranks; 0 if the step has none, which can "
        "happen with a chat dataset",
    ),
    "train/loss_mean": Figure(
        "nats per token",
        "mean of `train/loss` over the window; the console, the progress bar and the line in "
        "`loss.png` show this value",
    ),
    "train/grad_norm": Figure("", "global gradient norm of this step, before clipping"),
    "train/learning_rate": Figure("", "learning rate of this step"),
    "train/tokens_seen": Figure("tokens", "tokens of all launches, without padding"),
    "train/router_aux_loss": Figure(
        "",
        "load-balancing loss of this step before its coefficient, not part of `train/loss`; with "
        "`--router-aux-loss`",
    ),
    "experts/max_load": Figure("× mean", "largest `experts/layer_NN/max_load`"),
    "experts/layer_NN/max_load": Figure(
        "× mean", "load of the layer's fullest expert in the window, relative to the mean load"
    ),
    "experts/starved": Figure("share", "mean of `experts/layer_NN/starved`"),
    "experts/layer_NN/starved": Figure(
        "share", "experts of the layer with less than a tenth of the mean load in the window"
    ),
    "perf/tokens_per_sec": Figure(
        "tokens/s", "tokens of a step on all ranks, padding included, ÷ `time/total`"
    ),
    "perf/tokens_per_sec_per_device": Figure("tokens/s", "`perf/tokens_per_sec` ÷ ranks"),
    "perf/label_tokens_per_sec": Figure(
        "tokens/s", "label tokens of the window on all ranks ÷ its time"
    ),
    "perf/tflops": Figure(
        "TFLOP/s",
        "operations of one device in the window, counted as 6 N + 12 L H Q T per token (4 N for "
        "frozen weights)",
    ),
    "perf/mfu": Figure("share", "`perf/tflops` ÷ the peak that the log prints at the start"),
    "perf/run_tokens_per_sec": Figure(
        "tokens/s",
        "tokens of a step on all ranks, padding included, ÷ mean step time of the launch, with "
        "evaluation and saves; from the second step on",
    ),
    "perf/eta_sec": Figure(
        "s",
        "remaining steps × mean step time of the launch, with evaluation and saves; absent in the "
        "first and the last row",
    ),
    "time/data": Figure("ms per step", "mean time to get the batches, over the window"),
    "time/forward": Figure("ms per step", "mean time of the forward passes"),
    "time/backward": Figure("ms per step", "mean time of the backward passes"),
    "time/update": Figure("ms per step", "mean time of clipping and the optimizer"),
    "time/optimizer": Figure("ms per step", "mean time of the optimizer, a part of `time/update`"),
    "time/total": Figure(
        "ms per step",
        "wall time of the window ÷ its steps, on a GPU by the GPU's clock, without evaluation and "
        "waits for saves",
    ),
    "perf/loader_share": Figure(
        "share", "share of the step time spent waiting for data; with `--streaming`"
    ),
    "perf/loader_tokens_per_sec_per_device": Figure(
        "tokens/s", "tokens that the workers of this rank could produce; with `--streaming`"
    ),
    "memory/current_gib": Figure("GiB", "memory in use, rank 0"),
    "memory/reserved_gib": Figure("GiB", "memory held by the allocator, rank 0"),
    "memory/total_gib": Figure("GiB", "memory of the device, rank 0"),
    "memory/peak_gib": Figure(
        "GiB",
        "largest memory in use since this launch allocated the model (a GPU's allocator; resident "
        "memory on a CPU), rank 0",
    ),
    "memory/window_peak_gib": Figure(
        "GiB",
        "the peak since the previous row, with evaluation and saves. Some Linux kernels do not let "
        "a process reset its peak; a CPU run then reports the peak of the process",
    ),
    "memory/alloc_retries": Figure(
        "",
        "how often the allocator of a GPU had to return cached memory since the launch began, "
        "rank 0; not on a CPU",
    ),
    "perf/slowest_rank": Figure("rank", "the rank that takes longest for data and optimizer"),
    "perf/slowest_ratio": Figure(
        "× median", "time of that rank for them, relative to the median rank"
    ),
    "memory/max_peak_gib": Figure("GiB", "largest `memory/peak_gib` of all ranks"),
    "memory/max_peak_rank": Figure("rank", "the rank with that peak"),
    "eval/loss": Figure(
        "nats per token",
        "mean over the label tokens of the first `--eval-batches` global batches of the "
        "validation split; with several datasets, their weighted mean",
    ),
    "eval/perplexity": Figure("", "exp(`eval/loss`)"),
    "eval/loss/DATASET": Figure(
        "nats per token", "validation loss of one dataset; with several datasets"
    ),
}

STATE = {
    "status": Figure(
        "",
        "`running` (also after a kill), `complete`, `preempted`, `failed` or `disk_full`",
    ),
    "step": Figure("", "optimizer steps done"),
    "global_step": Figure("", "the value of `step`, under the name that other trainers use"),
    "epoch": Figure(
        "",
        "passes over the data; with `--streaming`, passes of rank 0 over its part of the files, "
        "in whole pieces of files",
    ),
    "total_steps": Figure("", "steps of the whole run"),
    "tokens": Figure("tokens", "tokens of all launches, without padding"),
    "sample_cursor": Figure("samples", "samples read so far"),
    "samples": Figure("samples", "samples in an epoch"),
    "checkpoints": Figure("", "steps of the complete checkpoints"),
    "updated": Figure("UTC", "when the file was written"),
}


def documented_name(key: str) -> str:
    """Return the key of METRICS under which a key of a row is documented."""
    key = re.sub(r"/layer_\d+/", "/layer_NN/", key)
    return "eval/loss/DATASET" if key.startswith("eval/loss/") else key
