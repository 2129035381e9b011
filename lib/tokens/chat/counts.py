"""Count conversations and the samples made from them, store the counts, and check them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lib.core import log, units
from lib.core.artifacts import CHAT_TEMPLATE
from lib.core.errors import UsageError
from lib.tokens import dataset_errors
from lib.tokens.chat.policy import ASSISTANT, ChatPolicy
from lib.tokens.store import TokenStore, make_damage_error

ERRORS = "errors.jsonl"  # lists the dropped conversations of a store
_MOST_STOPS = 4  # stop tokens in the report
SPLIT_OPTION = "--too-long split"
_TRIED = 1000  # conversations; stop if the template could render none of them
TOO_LONG = "too long"
_TEMPLATE_CAUSES = ("template", "no boundary")  # the template causes these
_LEAST_TRAINED = 0.01  # of the tokens
_MOST_REFUSED = 0.05  # of the conversations
_MUCH = 0.1  # of the conversations, for other causes
_LEAST_STOPPED = 0.5  # of the samples
_HINTS = {
    TOO_LONG: f"a larger --seq-length keeps them whole, and {SPLIT_OPTION} splits them",
    "nothing trained": "--train-on all trains on the turns of all roles",
}
_USUAL_HINT = (
    "--chat-template FILE uses another template, and --train-on all needs no answer boundaries"
)
# The rows cause these: stage 02 did not write the dataset, or it was changed later.
_ROW_CAUSES = (
    "unknown role",
    "roles out of order",
    "no assistant turn",
    "empty answer",
    "empty turn",
    "content",
    "arguments",
    "weights",
)


@dataclass
class ChatCounts:
    """Counts the conversations of a split and the samples made from them.

    The names of the fields are keys in the manifest. dropped: conversations by cause. stops: token
    id → samples whose last trained token is that special token. first: cause → the message for the
    first conversation dropped. unprompted: samples trained from their second token on, so they
    contain no prompt. longest: tokens of the longest conversation that is too long for a sample, 0
    if none is. left_out: how often the template omitted the system prompt or thoughts.
    """

    conversations: int = 0
    turns: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    unprompted: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    stops: Counter[int] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    longest: int = 0

    @property
    def trained_share(self) -> float:
        """Return the fraction of the tokens that are trained."""
        return self.trained / max(1, self.tokens)

    @property
    def ended_share(self) -> float:
        """Return the fraction of the samples that end with a stop token."""
        return self.stops.total() / max(1, self.samples)

    def add(self, other: ChatCounts) -> None:
        """Add the counts of another part of the dataset."""
        for name in vars(self).keys() - {"first", "longest"}:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        self.first = {**other.first, **self.first}

    def describe_causes(self) -> str:
        """Return the number of dropped conversations by cause as text, "" if none was dropped."""
        return ", ".join(f"{count:,} {cause}" for cause, count in self.dropped.most_common())

    def table_rows(self, names: Mapping[int, str]) -> dict[str, str]:
        """Return the counts as rows of a printed table. names: token id → token."""
        ends = ", ".join(
            f"{names[token]} {100 * count / max(1, self.samples):.3g} %"
            for token, count in self.stops.most_common(_MOST_STOPS)
        )
        causes = self.describe_causes()
        rows = {
            "conversations": f"{self.conversations:,} with {units.counted(self.turns, 'turn')}",
            "samples": f"{self.samples:,}, {100 * self.ended_share:.3g} % end with a stop "
            f"token{f' ({ends})' if ends else ''}",
            "tokens": f"{self.tokens:,}, {self.trained:,} trained "
            f"({100 * self.trained_share:.3g} %)",
        }
        left_out = ", ".join(f"{count:,} × {part}" for part, count in self.left_out.most_common())
        return (
            rows
            | ({"dropped": causes} if causes else {})
            | ({"omitted": f"{left_out}, by this chat template"} if left_out else {})
        )

    def to_record(self) -> dict[str, Any]:
        """Return the counts as a JSON object."""
        return {
            **vars(self),
            "dropped": dict(self.dropped),
            "left_out": dict(self.left_out),
            "stops": {str(token): count for token, count in self.stops.items()},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> ChatCounts:
        """Read the counts from a JSON object.

        Raises TypeError or ValueError if `to_record` cannot have written it.
        """
        stops = {int(token): count for token, count in record["stops"].items()}
        counts_read = cls(
            **{
                **record,
                "dropped": Counter(record["dropped"]),
                "stops": Counter(stops),
                "left_out": Counter(record["left_out"]),
            }
        )
        counts = [
            count
            for name, count in vars(counts_read).items()
            if name not in ("dropped", "stops", "left_out", "first")
        ]
        counts += [
            *counts_read.dropped.values(),
            *counts_read.stops.values(),
            *counts_read.left_out.values(),
        ]
        if not all(type(count) is int and count >= 0 for count in counts) or not isinstance(
            counts_read.first, dict
        ):
            raise ValueError("a count is not a whole number of at least 0")
        return counts_read


class ChatFacts(NamedTuple):
    """Describes prepared chat datasets.

    template: the Jinja source. stops: the token ids that end samples, the most frequent first.
    counts: split → its counts. names: token id → token, for the stop tokens.
    """

    template: str
    stops: list[int]
    counts: dict[str, ChatCounts]
    names: dict[int, str]

    def table_rows(self) -> dict[str, str]:
        """Return the counts of all splits as rows of a printed table."""
        rows: dict[str, str] = {}
        for name, counts in self.counts.items():
            prefix = "" if len(self.counts) == 1 else f"{name}: "
            rows |= {prefix + key: text for key, text in counts.table_rows(self.names).items()}
        return rows


def read_facts(store: TokenStore) -> ChatFacts | None:
    """Return what the store of a chat dataset records, or None for the store of a text dataset.

    Raises ArtifactError if the records are damaged.
    """
    if store.summary.get("label_mask") is None:
        return None
    try:
        record = store.summary["chat"]
        counts = {name: ChatCounts.from_record(one) for name, one in record["splits"].items()}
        names = {int(token): str(text) for token, text in record["stop_tokens"].items()}
        template = (store.path / CHAT_TEMPLATE).read_text(encoding="utf-8")
        return _build_facts(template, counts, names)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise make_damage_error(store.path) from None


def merge_facts(parts: Sequence[ChatFacts]) -> ChatFacts | None:
    """Merge the facts of several datasets that share a template; return None if there are none."""
    sums: dict[str, ChatCounts] = {}
    names: dict[int, str] = {}
    for part in parts:
        names |= part.names
        for split, counts in part.counts.items():
            sums.setdefault(split, ChatCounts()).add(counts)
    return _build_facts(parts[0].template, sums, names) if parts else None


def _build_facts(template: str, counts: dict[str, ChatCounts], names: dict[int, str]) -> ChatFacts:
    """Return the facts of a dataset. names: token id → token, for all stop tokens at least."""
    stops = sum((split.stops for split in counts.values()), Counter[int]())
    in_order = [token for token, _ in stops.most_common()]
    return ChatFacts(template, in_order, counts, {token: names[token] for token in in_order})


def require_maskable(chats: ChatCounts, path: Path) -> None:
    """Raise UsageError if a template could render none of the first conversations."""
    if (
        not chats.samples
        and chats.conversations >= _TRIED
        and sum(chats.dropped[cause] for cause in _TEMPLATE_CAUSES) == chats.conversations
    ):
        require_samples(chats, path)


def require_samples(chats: ChatCounts, path: Path) -> None:
    """Raise UsageError if the conversations gave no sample."""
    if not chats.conversations:
        raise UsageError(f"{path} contains no conversation")
    if chats.samples:
        return
    cause = chats.dropped.most_common(1)[0][0] if chats.dropped else ""
    hint = _HINTS.get(cause, _USUAL_HINT)
    run = ""
    if cause in _ROW_CAUSES:
        hint = "stage 02 converts the role names of other systems, and lists dropped rows:"
        run = dataset_errors.list_chat_commands(path)
    raise UsageError(
        f"the chat template gives no sample from {path}"
        if cause in _TEMPLATE_CAUSES
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


def _describe_loss(chats: ChatCounts, cause: str, count: int) -> str:
    """Return the text of a warning about a cause that dropped many conversations."""
    share = (
        f"{count:,} of {units.counted(chats.conversations, 'conversation')} "
        f"({100 * count / chats.conversations:.3g} %)"
    )
    if not cause.startswith(TOO_LONG):
        return f"{share} were dropped as `{cause}`. First error: {chats.first.get(cause, '')}"
    loss = f"were dropped; {SPLIT_OPTION} splits them" if cause == TOO_LONG else "lose answers"
    remedy = (
        f". The longest has {chats.longest:,} tokens: --seq-length {chats.longest} keeps them all"
        if chats.longest
        else ""
    )
    return f"{share} are too long for a sample and {loss}{remedy}"


def warn_about_samples(name: str, chats: ChatCounts, errors: Path) -> None:
    """Warn about unusual samples of a split.

    name: the dataset. errors: the file that lists the dropped conversations.
    """
    if chats.dropped:
        log.info(f"  {errors} lists the dropped conversations")
    refused = sum(chats.dropped[cause] for cause in _TEMPLATE_CAUSES)
    if refused > _MOST_REFUSED * chats.conversations:
        cause = max(_TEMPLATE_CAUSES, key=lambda cause: chats.dropped[cause])
        log.warn(
            f"{name}: the chat template cannot render {refused:,} of "
            f"{units.counted(chats.conversations, 'conversation')}; they were dropped. "
            f"First error: {chats.first.get(cause, '')}"
        )
    for cause, count in chats.dropped.items():
        if count > _MUCH * chats.conversations and cause not in _TEMPLATE_CAUSES:
            log.warn(f"{name}: {_describe_loss(chats, cause, count)}")
    if chats.samples and chats.ended_share < _LEAST_STOPPED:
        log.warn(
            f"{name}: {100 * chats.ended_share:.3g} % of the samples end with a stop token, "
            "so the trained model may not stop. The chat template should write a special token "
            "after each answer"
        )
