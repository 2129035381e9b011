"""Define the content of a checkpoint: the names of its tensors, and a record of all other state.

    model.<parameter>               float32 master weights
    buffer.<name>                   persistent buffers
    optimizer.exp_avg.<parameter>   first and second moments of AdamW
    optimizer.exp_avg_sq.<parameter>

Other optimizers have other states, which are tensors sharded like the parameter. Frozen parameters
are not saved. Learning rate and betas are not saved either, because they are functions of the
options and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from lib.core import records
from lib.core.errors import ArtifactError

if TYPE_CHECKING:  # reading records needs no torch
    from torch import Tensor, nn
    from torch.optim import Optimizer

MODEL = "model."
BUFFER = "buffer."
OPTIMIZER = "optimizer."
# Values that COMMIT repeats, so that a table of checkpoints needs no other file.
_FACTS = (
    "tokens",
    "loss",
    "eval_loss",
    "score",
    "unevaluated",
    "bad_steps",
    "samples_per_epoch",
    "resumed_from",
    "resumed_path",
)
# Of these, the values that only COMMIT contains: an evaluation that follows the save changes them.
_OF_COMMIT = {"eval_loss", "score", "unevaluated"}
_LOSS_SCALE = {"scale", "good_steps", "in_a_row", "sound_steps", "usual_norm"}  # of StepGuard


class _RequiredFields(TypedDict):
    step: int
    tokens: int
    samples: int
    seed: int
    total_steps: int
    rollbacks: int
    loss_scale: dict[str, float]
    optimizer_steps: int


class Score(TypedDict):
    """Decides which checkpoint is the best.

    key: of a figure of metrics.jsonl. value: the figure after this step; None if it was not
    measured.
    """

    key: str
    value: float | None


class EvaluationFacts(TypedDict, total=False):
    """The figures of a step's evaluation. score: see Score; only with --best-by."""

    eval_loss: float | None
    score: Score


class TrainRecord(_RequiredFields, EvaluationFacts, total=False):
    """train_state.json: all state of a run except tensors and random states.

    step: steps done. tokens: tokens seen, without padding. samples: index of the next sample.
    cursors: with --streaming, the cursor of each data-parallel rank. optimizer_steps: below `step`
    if steps were skipped. samples_per_epoch: None if the length of an epoch is unknown.
    resumed_from, resumed_path: digest and path of a checkpoint that the user named. loss,
    eval_loss: this step's values, if they were logged. unevaluated: the row of this step, if the
    checkpoint was saved before its evaluation or samples; COMMIT loses it when they are complete.
    Only COMMIT contains eval_loss, score and unevaluated.
    bad_steps: number of consecutive bad steps up to this step. model_files: digests of the files in
    the run's model/. base: digests of the base model's weight files.
    Optional fields can be missing in older checkpoints.
    """

    cursors: list[dict[str, Any]]
    world_size: int
    samples_per_epoch: int | None
    resumed_from: str | None
    resumed_path: str | None
    loss: float | None
    unevaluated: dict[str, Any]
    bad_steps: int
    model_files: dict[str, str]
    base: dict[str, str]


class RunState(Protocol):
    """The state of a run, as a checkpointer needs it."""

    step: int
    optimizer: Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, sharded as in the model."""

    def state_dict(self) -> TrainRecord:
        """Return the state that is not a tensor; all ranks must call this."""

    def load_state_dict(self, record: TrainRecord) -> None:
        """Load the state that is not a tensor."""


def name_tensors(model: nn.Module, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trainable parameters, persistent buffers and optimizer states by checkpoint name.

    Tensors keep their sharding; tied parameters occur once. states: the optimizer states, by
    `<state>.<parameter>`. If parameters are frozen, buffers are omitted, because the files of the
    base model contain them.
    """
    from lib.models.sharded import is_frozen, plain

    tensors = {MODEL + name: plain(p) for name, p in model.named_parameters() if p.requires_grad}
    if not is_frozen(model):
        persistent = model.state_dict().keys()
        tensors |= {BUFFER + name: b for name, b in model.named_buffers() if name in persistent}
    return tensors | {OPTIMIZER + name: value for name, value in states.items()}


def read_record(path: Path) -> TrainRecord:
    """Return the record in a file, which may lack fields (see `require_complete`).

    Raises ArtifactError if a value has the wrong type.
    """
    content = records.read_json(path)
    if not isinstance(content, dict):
        wrong = [path.name]
    else:
        wrong = [
            key
            for key, is_valid in _VALIDATORS.items()
            if key in content and not is_valid(content[key])
        ]
    if wrong:
        raise ArtifactError(
            f"{path} was not written by stage 04",
            found=f"values of the wrong type: {', '.join(wrong)}",
        )
    return content


def require_complete(record: TrainRecord, checkpoint: Path) -> None:
    """Raise ArtifactError if a record lacks a field that a resumed run needs."""
    missing = _RequiredFields.__annotations__.keys() - record.keys()
    if not missing:
        missing = _LOSS_SCALE - record["loss_scale"].keys()
    if missing:
        raise ArtifactError(
            f"{checkpoint} lacks state that a resumed run needs",
            found=f"missing in train_state.json: {', '.join(sorted(missing))}",
        )


def select_facts(record: TrainRecord) -> dict[str, Any]:
    """Return the fields of a record that COMMIT repeats."""
    content: Mapping[str, Any] = record
    return {key: content[key] for key in _FACTS if key in content}


def select_saved(record: TrainRecord) -> dict[str, Any]:
    """Return the fields of a record that train_state.json contains."""
    return {key: value for key, value in record.items() if key not in _OF_COMMIT}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_score(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("key"), str)
        and isinstance(value.get("value"), float | int | None)
    )


def _is_dict_of(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(type(item) in kinds for item in value.values())
    )


_VALIDATORS: dict[str, Callable[[Any], bool]] = dict.fromkeys(
    (
        "step",
        "tokens",
        "samples",
        "seed",
        "total_steps",
        "world_size",
        "bad_steps",
        "rollbacks",
        "optimizer_steps",
    ),
    _is_count,
) | {
    "loss_scale": _is_dict_of(int, float),
    "model_files": _is_dict_of(str),
    "base": _is_dict_of(str),
    "score": _is_score,
    "unevaluated": _is_dict_of(int, float),
    "cursors": lambda value: (
        isinstance(value, list) and all(map(_is_dict_of(int, type(None)), value))
    ),
}
