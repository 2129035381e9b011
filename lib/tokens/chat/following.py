"""Which part of a text a template has written knowing only the first n messages.

A template that walks through the messages once, forward, writes for the first n of them what it
would write if there were no others: up to the moment at which it asks for the next, both runs are
the same. So one rendering holds those of all beginnings, which otherwise have to be made one by
one. That it went forward is seen on each conversation; what it would write behind the last message
is known where its end names nothing of a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, cast

from jinja2 import nodes
from jinja2.runtime import LoopContext, missing

_VARYING = {"messages", "tools", "loop", "caller", "self"}


def tail(tree: nodes.Template) -> list[nodes.Node] | None:
    """Return the end of a template behind its loop over the messages.

    None where another kind of statement stands there, or the loop is none that can be followed.
    """
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"}
    stored |= {node.name for node in tree.find_all(nodes.Macro)}
    varying = _VARYING | stored
    body = tree.body
    start = next((i for i in range(len(body), 0, -1) if _names(body[i - 1]) & varying), 0)
    loop = body[start - 1] if start else None
    if not isinstance(loop, nodes.For) or loop.test or loop.recursive or loop.else_:
        return None
    if not isinstance(loop.iter, nodes.Name) or loop.iter.name not in _aliases(tree):
        return None
    if any("add_generation_prompt" in _names(node) for node in body[:start]):
        return None
    return body[start:]


def _names(node: nodes.Node) -> set[str]:
    return {found.name for found in [*node.find_all(nodes.Name), node]
            if isinstance(found, nodes.Name)}


def _aliases(tree: nodes.Template) -> set[str]:
    """Return the names that nothing but the messages, or a part of them, is bound to."""
    sources: dict[str, list[bool]] = {"messages": [True]}
    assigned = [node for node in tree.find_all(nodes.Assign) if isinstance(node.target, nodes.Name)]
    for node in assigned:
        name = cast(nodes.Name, node.target).name
        sources.setdefault(name, []).append(_is_part(node.node))
    stores = [node.name for node in tree.find_all(nodes.Name) if node.ctx != "load"]
    return {name for name, parts in sources.items() if all(parts)
            and stores.count(name) == len(parts) - (name == "messages")}


def _is_part(value: nodes.Node | None) -> bool:
    """Tell whether an expression is the messages or their end."""
    if isinstance(value, nodes.CondExpr):
        return _is_part(value.expr1) and _is_part(value.expr2)
    if isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice):
        return _is_part(value.node)
    return isinstance(value, nodes.Name) and value.name == "messages"


class Messages(Sequence[Any]):
    """Holds the messages of a conversation and notes which of them were asked for, and when.

    blocks: the text so far, to be filled by who renders. start: the first that is seen. Nothing
    has a name that a template could ask for: it would be empty for a list.
    """

    __slots__ = ("_blocks", "_messages", "_notes", "_start")

    def __init__(self, messages: Sequence[Any], blocks: list[str], start: int = 0,
                 notes: _Notes | None = None) -> None:
        self._blocks, self._messages, self._start = blocks, messages, start
        self._notes = notes or _Notes(len(messages))

    def __repr__(self) -> str:
        raise TypeError("the messages are to be written as a list")  # which this is not

    def __eq__(self, other: object) -> bool:
        raise TypeError("the messages are to be compared as a list")

    __hash__ = None  # type: ignore[assignment]

    def __len__(self) -> int:
        self._notes.ask(len(self._messages))
        return len(self._messages) - self._start

    def __bool__(self) -> bool:
        return len(self._messages) > self._start

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and key >= 0:
            self._notes.ask(self._start + key)
            return self._messages[self._start + key]
        if isinstance(key, slice) and key.stop is None and key.step is None \
                and isinstance(key.start, int) and key.start >= 0:
            start = min(self._start + key.start, len(self._messages))
            return Messages(self._messages, self._blocks, start, self._notes)
        self._notes.ask(len(self._messages))
        return list(self._messages[self._start:])[key]

    def __iter__(self) -> Iterator[Any]:
        self._notes.walks += 1
        return Walk(self._messages, self._blocks, self._start, self._notes)


def edges(messages: Messages) -> list[int]:
    """Return for each n where the text of the first n messages ends, -1 where not known.

    Empty where the messages were not walked through once.
    """
    notes = messages._notes
    if notes.walks != 1 or notes.at[-1] < 0:
        return []
    sizes = [*accumulate(map(len, messages._blocks), initial=0), -1]
    for n in notes.early:
        notes.at[n] = -1
    return [sizes[at] for at in notes.at]


class _Notes:
    """Holds what was seen of some messages.

    taken: how many the walk has reached. at: for each n, how many blocks were written when the one
    behind the first n was asked for; -1 where it was not. early: of which n it was known before
    whether there is another.
    """

    __slots__ = ("at", "count", "early", "taken", "walks")

    def __init__(self, count: int) -> None:
        self.count, self.taken, self.walks = count, 0, 0
        self.at = [-1] * (count + 1)
        self.early: set[int] = set()

    def ask(self, index: int) -> None:
        """Note that it was asked whether a message of this number is there."""
        self.early.update(range(self.taken, min(index + 1, self.count)))


class Walk(Iterator[Any]):
    """Walks through messages for a loop of a template."""

    __slots__ = ("_blocks", "_messages", "_next", "_notes")

    def __init__(self, messages: Sequence[Any], blocks: list[str], start: int, notes: _Notes
                 ) -> None:
        self._messages, self._blocks, self._next, self._notes = messages, blocks, start, notes

    def peek(self) -> None:
        """Note that the next one is asked for before the loop has come to it."""
        self._notes.ask(self._next)

    def __next__(self) -> Any:
        notes, index = self._notes, self._next
        notes.at[index] = len(self._blocks)
        if index == notes.count:
            raise StopIteration
        self._next = notes.taken = index + 1
        return self._messages[index]


class Loop(LoopContext):
    """Is the `loop` of a template; looks ahead not unnoticed."""

    def _peek_next(self) -> Any:
        if self._after is missing and isinstance(self._iterator, Walk):
            self._iterator.peek()
        return super()._peek_next()
