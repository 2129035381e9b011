"""Open the model to evaluate: a directory, or the newest export of a run; shard it over ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from lib.core import commands, log, manifest, paths, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST, Experiment
from lib.models import architecture, directory, lookup
from lib.models.lora import freeze_parameters
from lib.models.tensors import COMPUTE_DTYPES
from lib.models.weights import load_pretrained
from lib.parallel import loss, parallelize
from lib.parallel.layout import ParallelLayout

_LONGEST = 4096  # tokens of the window, if neither the config nor an option limits it


def find_directory(name: str, cache_dir: Path) -> Path:
    """Return the model directory that a person names, and log it.

    name: a model, as for `-m` of stage 04, or a run, which stands for its newest export. Raises
    UsageError or ArtifactError if there is none, or if it lacks weights.
    """
    run = _find_run(name)
    if run is None:
        found = lookup.find_model(name, cache_dir)
    else:
        found = lookup.find_model(str(find_newest_export(run)), cache_dir)
    if missing := directory.list_missing_weights(found):
        raise ArtifactError(
            f"{found} contains no complete weights",
            found="\n".join(missing[:5]),
            hint="a model from scratch has none before stage 04 trains it"
            if directory.is_made_from_scratch(found)
            else "",
        )
    return found


def find_newest_export(run: Experiment) -> Path:
    """Return the export of a run's latest step that is a model, not an adapter.

    Raises ArtifactError, with the command of stage 05, if there is none.
    """
    exports = [
        (int(content["summary"].get("step", 0)), path.parent)
        for path in run.exports.glob(f"*/{MANIFEST}")
        if (content := manifest.read_if_any(path.parent))
        and (path.parent / directory.CONFIG).is_file()
    ]
    if not exports:
        raise ArtifactError(
            f"{run.root} has no export",
            expected="a model directory that stage 05 has written",
            run=commands.script("05_export_checkpoint.py", "-e", run.root),
        )
    step, newest = max(exports)
    saved = [paths.step_of(path.name) for path in run.checkpoints.glob("step_*")]
    latest = max((number for number in saved if number is not None), default=step)
    if latest > step:
        log.warn(
            f"the newest export is of step {step:,}, and there is a checkpoint of step {latest:,}; "
            f"to evaluate it, export it first: "
            + commands.script("05_export_checkpoint.py", "-e", run.root)
        )
    return newest


def load_model(
    model_dir: Path, precision: str, layout: ParallelLayout, trust_code: bool = False
) -> PreTrainedModel:
    """Return a model with its weights, sharded if there are several ranks.

    precision: fp32, bf16 or fp16, of weights and compute. All ranks must call this.
    """
    model = architecture.build_on_meta(model_dir, trust_code=trust_code)
    freeze_parameters(model, COMPUTE_DTYPES[precision])
    if layout.ranks > 1:
        description = parallelize.parallelize(model, layout.fsdp, precision)
        log.info(f"sharded over {units.counted(layout.ranks, 'rank')}: {description.split(';')[0]}")
    parallelize.materialise(model, layout.device, offload=False)
    load_pretrained(model, model_dir)
    model.eval()
    loss.chunk_loss(model, layout)
    return model


def choose_window(model: PreTrainedModel, asked: int | None) -> int:
    """Return the most tokens that the model reads at once.

    asked: the value of --max-length, None for the longest that the config allows. Raises UsageError
    if the model does not allow as many.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if asked and longest and asked > longest:
        raise UsageError(
            f"--max-length {asked} is longer than the model allows",
            expected=f"at most {longest} (max_position_embeddings in config.json)",
        )
    return asked or longest or _LONGEST


def default_precision(layout: ParallelLayout) -> str:
    """Return bf16 on a GPU that computes in it, and fp32 elsewhere."""
    has_bf16 = layout.device.type == "cuda" and torch.cuda.is_bf16_supported(False)
    return "bf16" if has_bf16 else "fp32"


def _find_run(name: str) -> Experiment | None:
    """Return the run with a name or a directory, None if it is no run."""
    if (Path(name) / directory.CONFIG).is_file():
        return None
    try:
        run = paths.existing_experiment(name)
    except UsageError:
        return None
    return run if run.config.is_file() or run.model.is_dir() else None
