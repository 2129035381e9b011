"""Read the marks that exclude turns from training, and find the keys that stage 02 does not use.

Each trainer has its own name for such a mark: `weight` (OpenAI), `train` (Axolotl), `loss` and
`loss_scale` (ms-swift, LLaMA-Factory), `train_on_turn`, `trainable`, `masked`. A key that looks
like a mark, but whose meaning is not known, refuses its record: no mark is lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lib.core.conversation import CALLS, InvalidConversation

# True or 1 under these keys: the turn is trained.
_WEIGHTS = ("weight", "weights", "loss", "loss_mask", "loss_scale", "loss_weight", "compute_loss")
TRAINED = frozenset((*_WEIGHTS, "train", "training", "trainable", "train_on_turn"))
# True under these keys: the turn is not trained.
EXCLUDED = frozenset(("mask", "masked", "ignore_loss", "no_loss", "exclude", "skip"))
_WORDS = re.compile(
    r"(loss(es)?|train(ed|ing|able)?|mask(s|ed)?|weight(s|ed)?|ignored?|excluded?|skip(ped)?|"
    r"supervised?|learn(ed|able)?)"
)
_TEXTS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
_TURN_KEYS = TRAINED | EXCLUDED | {"role", "from", "content", "value", CALLS, "function_call"}
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
_PART_KEYS = frozenset(("type", "text"))
_EMPTY: tuple[Any, ...] = (None, "", [], {})


def may_be_mark(key: str) -> bool:
    """Return whether a key may exclude something from training, by the words in it."""
    words = re.split(r"[^a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", key).lower())
    return any(map(_WORDS.fullmatch, words))


def read_weight(holder: Mapping[str, Any], where: str) -> float | None:
    """Return the weight that the marks of a turn, record or part give it, None without a mark.

    A single mark against training is enough for 0. where: the holder, for errors. Raises
    InvalidConversation if a mark has an unknown meaning.
    """
    weights = []
    for key, value in holder.items():
        if value in _EMPTY or not (key in TRAINED or key in EXCLUDED or may_be_mark(key)):
            continue
        is_trained = _TEXTS.get(str(value).lower())
        # A number under `mask` may mean either.
        is_known = key in TRAINED or (key in EXCLUDED and isinstance(value, (bool, str)))
        if is_trained is None or not is_known:
            raise InvalidConversation(
                "weights",
                f"{where} has the key {key!r:.40} with {value!r:.40}, which may exclude it from "
                "training. Known are true, false, 0 and 1 under "
                f"{', '.join(sorted(TRAINED))}, and true and false under "
                f"{', '.join(sorted(EXCLUDED))}. Rename the key, or remove it",
            )
        weights.append(float(is_trained == (key in TRAINED)))
    return min(weights, default=None)


def require_parts_trained(content: Any, where: str) -> None:
    """Raise InvalidConversation if a part of a content must not be trained.

    A turn is trained as a whole, so no mark of a part can be honoured.
    """
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and read_weight(part, f"a part of {where}") == 0:
            raise InvalidConversation(
                "weights",
                f"a part of {where} must not be trained, but a turn is trained as a whole",
            )


def list_unused(turns: list[Any]) -> Iterator[str]:
    """Yield each key that is not used in the turns of a record and their parts, as `turn: KEY`."""
    for turn in turns:
        if not isinstance(turn, dict):
            continue
        content = turn.get("content", turn.get("value"))
        if len(turn) == 2 and isinstance(content, str):
            continue
        for key, value in turn.items():
            is_used = key in _TURN_KEYS or (
                isinstance(value, str)
                if key in _THOUGHTS
                else key in ("name", "tool_call_id") and isinstance(value, (str, int))
            )
            if not is_used and value not in _EMPTY:
                yield f"turn: {key}"
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                keys = part.keys() - _PART_KEYS - TRAINED - EXCLUDED
                yield from (f"part: {key}" for key in sorted(keys) if part[key] not in _EMPTY)
