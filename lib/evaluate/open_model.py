"""Open the model to evaluate: a directory, or a checkpoint of a run; shard it over ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from lib.checkpoints import commit, snapshot
from lib.checkpoints.commit import Checkpoint
from lib.core import commands, log, manifest, paths, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.paths import MANIFEST, Experiment
from lib.export import checkpoint_choice
from lib.export.base_model import BaseModel
from lib.models import architecture, directory, lookup, model_changes
from lib.models.lora import freeze_parameters
from lib.models.sharded import Placement, restore_ties
from lib.models.tensors import COMPUTE_DTYPES
from lib.models.weights import load_pretrained, restore_buffers
from lib.parallel import parallelize
from lib.parallel.layout import ParallelLayout, on_all_ranks, on_rank_0
from lib.runs import run_records
from lib.tokens.chat.policy import TEMPLATE_INPUT

_LONGEST = 4096  # tokens that the model reads if neither the config nor an option limits it


@dataclass(frozen=True)
class EvaluatedModel:
    """Describes the model to evaluate.

    directory: contains the config and the tokenizer, and the weights if `checkpoint` is None. base:
    the base model if the checkpoint belongs to a LoRA run. template_variables: the value of
    --chat-template-kwargs of the run.
    """

    directory: Path
    checkpoint: Checkpoint | None = None
    base: BaseModel | None = None
    template_variables: str = ""

    @property
    def path(self) -> Path:
        """Return the directory with the weights."""
        return self.checkpoint.path if self.checkpoint else self.directory

    @property
    def answers_questions(self) -> bool:
        """Return whether the run was on conversations; True if the model is of no run."""
        return not self.checkpoint or TEMPLATE_INPUT in _read_identity(self.checkpoint, "inputs")


def find_evaluated_model(
    name: str, cache_dir: Path, step: str | None, base: str | None
) -> EvaluatedModel:
    """Return the model that a person names: as for `-m` of stage 04, by a run or a checkpoint.

    For a run, this is the checkpoint that `step` names (a number, latest or best), by default the
    newest one. If the run has no checkpoint, it is the newest export. base: the directory of a LoRA
    run's base model, if it was moved. Raises UsageError or ArtifactError if there is no such model,
    if it lacks weights, or if an option does not apply.
    """
    path = Path(name).absolute()
    is_checkpoint = path.parent.name == "checkpoints" and paths.step_of(path.name) is not None
    if is_checkpoint:
        name = str(path.parents[1])
    elif path.name == "checkpoints":
        name = str(path.parent)
    run = _find_run(name)
    if run is None:
        if typed := [o for o, v in (("--step", step), ("--model-name", base)) if v]:
            raise UsageError(
                f"{' and '.join(typed)} {'needs' if len(typed) == 1 else 'need'} a run",
                found=f"{name}, which is not a run",
            )
        return EvaluatedModel(_require_weights(lookup.find_model(name, cache_dir)))
    if is_checkpoint:
        step = step or str(paths.step_of(path.name))
    if step is None and not commit.list_checkpoints(run.checkpoints):
        return EvaluatedModel(
            _require_weights(lookup.find_model(str(_find_newest_export(run)), cache_dir))
        )
    checkpoint = checkpoint_choice.find_checkpoint(run, step or checkpoint_choice.LATEST)
    log.info(f"model: {checkpoint.path}")
    is_lora = bool(_read_options(checkpoint).get("lora_rank"))
    if base and not is_lora:
        raise UsageError(
            "--model-name requires a LoRA run", found=f"{run.root} trained the full model"
        )
    config = run_records.read_config(run)
    base_model = BaseModel.find(base, config, checkpoint) if is_lora else None
    variables = str(config.get("chat_template_kwargs") or "")
    return EvaluatedModel(run.model, checkpoint, base_model, variables)


def load_model(
    source: EvaluatedModel, precision: str, layout: ParallelLayout, trust_code: bool = False
) -> PreTrainedModel:
    """Return a model with its weights, sharded if there are several ranks.

    precision: fp32, bf16 or fp16, for weights and compute. All ranks must call this.
    """
    model = architecture.build_on_meta(source.directory, trust_code=trust_code)
    added: set[str] = set()
    if source.checkpoint:
        # Ranks that looked at different times may have found different checkpoints.
        source = replace(source, checkpoint=on_rank_0(lambda: source.checkpoint, layout.control))
        added = _attach_adapters(model, source)
    freeze_parameters(model, COMPUTE_DTYPES[precision])
    if layout.ranks > 1:
        description = parallelize.parallelize(model, layout.fsdp, precision)
        log.info(f"sharded over {units.counted(layout.ranks, 'rank')}: {description.split(';')[0]}")
    parallelize.materialise_model(model, layout.device, offload=False)
    if source.checkpoint:
        _load_checkpoint(model, source.checkpoint, source.base, added, layout)
    else:
        load_pretrained(model, source.directory)
    return model.eval()


def choose_context_length(config: PretrainedConfig, max_length: int | None) -> int:
    """Return the most tokens that a model reads at once.

    config: the config of the language model. max_length: the value of --max-length, None for the
    longest input that the config allows. Raises UsageError if the config allows less than
    `max_length`.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if max_length and longest and max_length > longest:
        raise UsageError(
            f"--max-length {max_length} is longer than the model allows",
            expected=f"at most {longest} (max_position_embeddings in config.json)",
        )
    return max_length or longest or _LONGEST


def choose_precision(layout: ParallelLayout) -> str:
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


def _require_weights(model_dir: Path) -> Path:
    """Return a model directory. Raises ArtifactError if it lacks weights."""
    if missing := directory.list_missing_weights(model_dir):
        raise ArtifactError(
            f"{model_dir} does not contain all weights",
            found="\n".join(missing[:5]),
            hint="a model from scratch has no weights before stage 04 trains it"
            if directory.is_made_from_scratch(model_dir)
            else "",
        )
    return model_dir


def _find_newest_export(run: Experiment) -> Path:
    """Return the export of a run's latest step that is a model, not an adapter.

    Raises ArtifactError, with the command of stage 04, if there is none.
    """
    exports = [
        (int(content["summary"].get("step", 0)), path.parent)
        for path in run.exports.glob(f"*/{MANIFEST}")
        if (content := manifest.read_if_any(path.parent))
        and (path.parent / directory.CONFIG).is_file()
    ]
    if not exports:
        raise ArtifactError(
            f"{run.root} has no checkpoint and no export",
            run=commands.train("--config", run.config) if run.config.exists() else "",
        )
    return max(exports)[1]


def _read_options(checkpoint: Checkpoint) -> dict[str, object]:
    """Return the options that decide what a checkpoint contains."""
    return _read_identity(checkpoint, "options")


def _read_identity(checkpoint: Checkpoint, part: str) -> dict[str, object]:
    return checkpoint.commit().get("identity", {}).get(part, {})


def _attach_adapters(model: PreTrainedModel, source: EvaluatedModel) -> set[str]:
    """Attach the adapters of a LoRA run to a model on meta; return their parameters' names."""
    if source.base is None or source.checkpoint is None:
        return set()
    settings = model_changes.select_settings(_read_options(source.checkpoint))
    (lora,) = model_changes.build_changes({"lora": settings["lora"]})
    return model_changes.apply_changes(model, [lora], Placement()).added


def _load_checkpoint(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    base: BaseModel | None,
    added: set[str],
    layout: ParallelLayout,
) -> None:
    """Load the weights of a checkpoint once its files match their digests, on all ranks."""
    by_rank = on_all_ranks(
        lambda: checkpoint.content_problems(layout.rank, layout.ranks, for_export=base is None),
        layout.control,
    )
    problems = [problem for problems in by_rank for problem in problems]
    checkpoint_choice.require_undamaged(checkpoint, problems)
    if base:
        on_rank_0(lambda: base.require_same_weights(checkpoint, False), layout.control)
        load_pretrained(model, base.directory)
    else:
        restore_ties(model)
        restore_buffers(model)
    snapshot.load_weights(checkpoint, model, added, layout.control)
