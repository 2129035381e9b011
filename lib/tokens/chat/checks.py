"""Whether what became of conversations can be trained on: refused, or told, with the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lib.core import log, units
from lib.core.errors import UsageError
from lib.tokens import lacking
from lib.tokens.chat.outcome import ChatCounts
from lib.tokens.chat.policy import ASSISTANT, ChatPolicy
from lib.tokens.shown import bracketed

SPLIT_OPTION = "--too-long split"
_LOOKED_AT = 1000  # conversations after which a template is given up that suits none of them
_OF_TEMPLATE = ("template", "no boundary")  # causes that lie in the template
_FEWEST = 0.01  # of the tokens, trained
_MOST_UNSUITED = 0.05  # of the conversations
_MOST_END = 0.5  # of the samples, in a stop token
_LONGEST = 60  # characters of a part of a sample that is shown, and so many parts
_PARTS = 5
_MORE = {
    "too long": f"a larger --seq-length keeps them whole, and {SPLIT_OPTION} cuts them",
    "nothing trained": "--train-on all trains on what others say as well",
}
_OTHER = "--chat-template FILE takes another template, and --train-on all needs no mask"
# Causes that lie in the rows of a dataset that stage 02 did not write, or that was changed since.
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
    """Raise UsageError when so many conversations show that a template suits none of them."""
    if (
        not chats.samples
        and chats.conversations >= _LOOKED_AT
        and sum(chats.dropped[cause] for cause in _OF_TEMPLATE) == chats.conversations
    ):
        require_some(chats, path)


def require_some(chats: ChatCounts, path: Path) -> None:
    """Raise UsageError when there is no sample."""
    if not chats.conversations:
        raise UsageError(f"{path} holds no conversation")
    if chats.samples:
        return
    cause = chats.dropped.most_common(1)[0][0] if chats.dropped else ""
    hint = _MORE.get(cause, _OTHER)
    run = ""
    if cause in _OF_ROWS:
        hint = "stage 02 converts the role names of other systems, and lists dropped rows:"
        run = lacking.commands_for_chats(path)
    raise UsageError(
        f"the chat template gives no sample of {path}"
        if cause in _OF_TEMPLATE
        else f"no conversation of {path} gives a sample",
        found="\n".join(
            [
                f"{units.counted(chats.conversations, 'conversation')}, of which all are dropped",
                *(
                    f"{count:,} {kind}, the first: {chats.first.get(kind, '')}"
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
    """Raise UsageError when there is no sample, or a mask of the assistant's words is implausible.

    examples: samples in words, what is trained in ⟦…⟧.
    """
    require_some(chats, path)
    if policy.train_on != ASSISTANT:
        return
    tokens = units.counted(chats.tokens, "token")
    samples = units.counted(chats.samples, "sample")
    found = "\n".join([f"{chats.trained:,} of {tokens} in {samples} are trained, as in", *examples])
    if chats.unprompted == chats.samples:
        raise UsageError(
            f"every sample of {path} would be trained from its beginning on",
            expected="only what the assistant says, behind what it answers to",
            found=found,
            hint="the `{% generation %}` of the chat template may stand "
            "around all of it; --train-on all trains on all of it",
        )
    if chats.trained_share < _FEWEST:
        raise UsageError(
            f"only {100 * chats.trained_share:.2g} % of the tokens of {path} would be trained",
            found=found,
            expected=f"{100 * _FEWEST:g} % or more with --train-on {ASSISTANT}",
            hint="the chat template may leave answers out; where they are as short "
            "as that, --train-on last trains the last one of each",
        )


def warn(name: str, chats: ChatCounts, errors: Path) -> None:
    """Tell what is odd about the samples of a split. name: of the dataset. errors: where each
    conversation is named that was dropped."""
    if chats.dropped:
        log.info(f"  {errors} names each conversation that was dropped")
    unsuited = sum(chats.dropped[cause] for cause in _OF_TEMPLATE)
    if unsuited > _MOST_UNSUITED * chats.conversations:
        cause = max(_OF_TEMPLATE, key=lambda each: chats.dropped[each])
        log.warn(
            f"{name}: the chat template suits {unsuited:,} of "
            f"{units.counted(chats.conversations, 'conversation')} not, which are dropped; of "
            f"the first it is said: {chats.first.get(cause, '')}"
        )
    if chats.samples and chats.ended_share < _MOST_END:
        log.warn(
            f"{name}: {100 * chats.ended_share:.3g} % of the samples end in a token that "
            "would end an answer: a model that is trained on them may not stop. See the chat "
            "template: what it writes behind an answer should be a special token"
        )


def shown(tokenizer: Any, tokens: np.ndarray, trained: np.ndarray) -> str:
    """Return a sample in words, on one line: what is trained in ⟦…⟧, long parts cut short."""
    cuts = np.flatnonzero(np.diff(trained)) + 1
    parts = []
    for ids, is_trained in zip(np.split(tokens, cuts), np.split(trained, cuts), strict=True):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        text = (
            text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]}…{text[-_LONGEST // 2 :]}"
        )
        text = text.replace("\n", "\\n")
        parts.append(bracketed(text, bool(is_trained[:1].any())))
    return "".join(parts[:_PARTS]) + ("…" if len(parts) > _PARTS else "")
