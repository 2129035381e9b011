"""Check that the prepared samples can be trained on, and warn about unusual ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import log, units
from lib.core.errors import UsageError
from lib.tokens import dataset_errors
from lib.tokens.chat.outcome import ChatCounts
from lib.tokens.chat.policy import ASSISTANT, ChatPolicy
from lib.tokens.shown import mark_trained

SPLIT_OPTION = "--too-long split"
_TRIED = 1000  # conversations; stop if the template could render none of them
_OF_TEMPLATE = ("template", "no boundary")  # the template causes these
_LEAST_TRAINED = 0.01  # of the tokens
_MOST_REFUSED = 0.05  # of the conversations
_LEAST_STOPPED = 0.5  # of the samples
# Of a printed sample: characters per part, and parts.
_LONGEST = 60
_PARTS = 5
_MORE = {
    "too long": f"a larger --seq-length keeps them whole, and {SPLIT_OPTION} splits them",
    "nothing trained": "--train-on all trains on the turns of all roles",
}
_OTHER = "--chat-template FILE uses another template, and --train-on all needs no answer boundaries"
# The rows cause these: stage 02 did not write the dataset, or it was changed later.
_OF_ROWS = (
    "unknown role",
    "roles out of order",
    "no assistant turn",
    "empty answer",
    "empty turn",
    "content",
    "weights",
)


def require_maskable(chats: ChatCounts, path: Path) -> None:
    """Raise UsageError if a template could render none of the first conversations."""
    if (
        not chats.samples
        and chats.conversations >= _TRIED
        and sum(chats.dropped[cause] for cause in _OF_TEMPLATE) == chats.conversations
    ):
        require_samples(chats, path)


def require_samples(chats: ChatCounts, path: Path) -> None:
    """Raise UsageError if there is no sample."""
    if not chats.conversations:
        raise UsageError(f"{path} contains no conversation")
    if chats.samples:
        return
    cause = chats.dropped.most_common(1)[0][0] if chats.dropped else ""
    hint = _MORE.get(cause, _OTHER)
    run = ""
    if cause in _OF_ROWS:
        hint = "stage 02 converts the role names of other systems, and lists dropped rows:"
        run = dataset_errors.list_chat_commands(path)
    raise UsageError(
        f"the chat template gives no sample from {path}"
        if cause in _OF_TEMPLATE
        else f"no conversation in {path} gives a sample",
        found="\n".join(
            [
                f"{units.counted(chats.conversations, 'conversation')}, all dropped",
                *(
                    f"{count:,} {kind}. First error: {chats.first.get(kind, '')}"
                    for kind, count in chats.dropped.most_common()
                ),
            ]
        ),
        hint=hint,
        run=run,
    )


def require_trainable(
    chats: ChatCounts, policy: ChatPolicy, path: Path, examples: Sequence[str]
) -> None:
    """Raise UsageError if there is no sample, or if the loss mask is implausible.

    examples: readable samples with the trained parts in ⟦…⟧.
    """
    require_samples(chats, path)
    if policy.train_on != ASSISTANT:
        return
    tokens = units.counted(chats.tokens, "token")
    samples = units.counted(chats.samples, "sample")
    found = "\n".join(
        [f"{chats.trained:,} of {tokens} in {samples} are trained. Examples:", *examples]
    )
    if chats.unprompted == chats.samples:
        raise UsageError(
            f"every sample from {path} would be trained from its beginning",
            expected="a prompt that is not trained before each answer",
            found=found,
            hint="the `{% generation %}` block of the chat template may enclose the whole text. "
            "--train-on all trains on the whole text",
        )
    if chats.trained_share < _LEAST_TRAINED:
        raise UsageError(
            f"only {100 * chats.trained_share:.2g} % of the tokens from {path} would be trained",
            found=found,
            expected=f"{100 * _LEAST_TRAINED:g} % or more with --train-on {ASSISTANT}",
            hint="the chat template may omit answers. If the answers really are that short, "
            "--train-on last trains the last answer of each conversation",
        )


def warn_about_samples(name: str, chats: ChatCounts, errors: Path) -> None:
    """Warn about unusual samples of a split.

    name: the dataset. errors: the file that lists the dropped conversations.
    """
    if chats.dropped:
        log.info(f"  {errors} lists the dropped conversations")
    refused = sum(chats.dropped[cause] for cause in _OF_TEMPLATE)
    if refused > _MOST_REFUSED * chats.conversations:
        cause = max(_OF_TEMPLATE, key=lambda cause: chats.dropped[cause])
        log.warn(
            f"{name}: the chat template cannot render {refused:,} of "
            f"{units.counted(chats.conversations, 'conversation')}; they were dropped. "
            f"First error: {chats.first.get(cause, '')}"
        )
    if chats.samples and chats.ended_share < _LEAST_STOPPED:
        log.warn(
            f"{name}: {100 * chats.ended_share:.3g} % of the samples end with a stop token, "
            "so the trained model may not stop. The chat template should write a special token "
            "after each answer"
        )


def render_sample(tokenizer: Any, tokens: np.ndarray, trained: np.ndarray) -> str:
    """Return a sample on one line, with trained parts in ⟦…⟧ and long parts shortened."""
    cuts = np.flatnonzero(np.diff(trained)) + 1
    parts = []
    for ids, is_trained in zip(np.split(tokens, cuts), np.split(trained, cuts), strict=True):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        text = (
            text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
        )
        text = text.replace("\n", "\\n")
        parts.append(mark_trained(text, bool(is_trained[:1].any())))
    return "".join(parts[:_PARTS]) + ("…" if len(parts) > _PARTS else "")
