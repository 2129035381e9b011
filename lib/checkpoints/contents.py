"""What a checkpoint holds: tensors under names that say what they are, and a record of the rest.

    model.<parameter>               float32 masters
    buffer.<name>                   persistent buffers
    optimizer.exp_avg.<parameter>   first and second moments of AdamW
    optimizer.exp_avg_sq.<parameter>

or what else the optimizer's states are, if they are tensors sharded like the parameter. What is
frozen is not saved. Learning rate and betas are functions of the options and the step, so they are
not saved either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from lib.core import records
from lib.core.errors import ArtifactError

if TYPE_CHECKING:  # who only reads records does not wait for it
    from torch import Tensor, nn
    from torch.optim import Optimizer

MODEL = "model."
BUFFER = "buffer."
OPTIMIZER = "optimizer."
# What a COMMIT repeats of the record, so that a table of checkpoints needs no other file.
_FACTS = (
    "tokens",
    "loss",
    "eval_loss",
    "bad_steps",
    "samples_per_epoch",
    "resumed_from",
    "resumed_path",
)
_PRECISIONS = ("bf16", "fp16", "fp32", "fp8")
_LOSS_SCALE = {"scale", "good_steps", "in_a_row", "sound_steps", "usual_norm"}  # of StepGuard


class _Needed(TypedDict):
    step: int
    tokens: int
    samples: int
    seed: int
    total_steps: int
    rollbacks: int
    loss_scale: dict[str, float]
    optimizer_steps: int


class Probe(TypedDict):
    """Logits of a fixed row of tokens, [positions][sampled], and the precision they are in."""

    precision: str
    logits: list[list[float]]


class TrainRecord(_Needed, total=False):
    """train_state.json: all state of a run that is neither a tensor nor random.

    step, tokens: done and seen, without padding. samples: number of the next one. cursors: with
    --streaming, of each data-parallel rank. optimizer_steps: fewer than steps where some were
    skipped. samples_per_epoch: None where an epoch has no known length. resumed_from, resumed_path:
    digest and place of a checkpoint that a person named. loss, eval_loss: of this step, if it was
    logged. bad_steps: in a row, at this step. model_files: digests of the files in the run's
    model/. base: of the files with the weights that stay frozen. probe: of a run with adapters,
    what the model computes, see lib/parallel/probe.py. Those that a run does not go on from may be
    missing in older checkpoints.
    """

    cursors: list[dict[str, Any]]
    world_size: int
    samples_per_epoch: int | None
    resumed_from: str | None
    resumed_path: str | None
    loss: float | None
    eval_loss: float | None
    bad_steps: int
    model_files: dict[str, str]
    base: dict[str, str]
    probe: Probe


class Saved(Protocol):
    """The state of a run, as its checkpoints see it."""

    step: int
    optimizer: Optimizer

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors by name, sharded as they are."""

    def state_dict(self) -> TrainRecord:
        """Return all other state; all ranks must call this."""

    def load_state_dict(self, record: TrainRecord) -> None:
        """Take up all other state."""


def name_tensors(model: nn.Module, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters (sharded as they are; tied ones once), persistent buffers and states.

    states: of the optimizer, by `<state>.<parameter>`. Where parameters are frozen, only those that
    are not: the rest is in the files of the model that the run began with.
    """
    from lib.models.sharded import is_frozen, plain

    tensors = {MODEL + name: plain(p) for name, p in model.named_parameters() if p.requires_grad}
    if not is_frozen(model):
        persistent = model.state_dict().keys()
        tensors |= {BUFFER + name: b for name, b in model.named_buffers() if name in persistent}
    return tensors | {OPTIMIZER + name: value for name, value in states.items()}


def read(path: Path) -> TrainRecord:
    """Return what the file holds; ArtifactError when a value has another type than is written.

    Values that are not there are for those who need them to miss.
    """
    content = records.read_json(path)
    if not isinstance(content, dict):
        wrong = [path.name]
    else:
        wrong = [
            key for key, is_sound in _SOUND.items() if key in content and not is_sound(content[key])
        ]
    if wrong:
        raise ArtifactError(
            f"{path} is not one that stage 04 wrote",
            found=f"values of another type: {', '.join(wrong)}",
        )
    return content


def require_complete(record: TrainRecord, checkpoint: Path) -> None:
    """Raise ArtifactError when a record lacks what a run goes on from."""
    lacking = _Needed.__annotations__.keys() - record.keys()
    if not lacking:
        lacking = _LOSS_SCALE - record["loss_scale"].keys()
    if lacking:
        raise ArtifactError(
            f"{checkpoint} lacks what a run goes on from",
            found=f"no {', '.join(sorted(lacking))} in its train state",
        )


def facts(record: TrainRecord) -> dict[str, Any]:
    """Return what a COMMIT repeats of a record."""
    content: Mapping[str, Any] = record
    return {key: content[key] for key in _FACTS if key in content}


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_probe(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.get("precision") in _PRECISIONS
        and isinstance(value.get("logits"), list)
        and all(
            isinstance(row, list)
            and all(type(logit) is float for logit in row)
            and len(row) == len(value["logits"][0])
            for row in value["logits"]
        )
    )


def _all(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, dict) and all(type(each) in kinds for each in value.values())
    )


_SOUND: dict[str, Callable[[Any], bool]] = dict.fromkeys(
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
    "loss_scale": _all(int, float),
    "model_files": _all(str),
    "base": _all(str),
    "probe": _is_probe,
    "cursors": lambda value: isinstance(value, list) and all(map(_all(int, type(None)), value)),
}
