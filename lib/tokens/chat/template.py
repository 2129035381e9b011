"""Render a chat template in a sandbox, with limits on time and size.

Templates come with the model from the Hub, so they are untrusted code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta, nodes

from lib.core.conversation import Message
from lib.core.errors import UsageError
from lib.tokens.chat import sandbox
from lib.tokens.chat.sandbox import LimitError, TemplateError

Span = tuple[int, int]  # of characters, the end exclusive

# A rendered text may have _FACTOR times the characters of its content, and always _AT_LEAST.
_FACTOR = 64
_AT_LEAST = 1 << 20


class Rendered(NamedTuple):
    """Holds a rendered text and the spans that its template marks as the assistant's."""

    text: str
    marks: list[Span]


class Template:
    """Renders conversations with a chat template.

    source: the Jinja source. tokens: the special tokens that it may use, such as `bos_token`.
    Raises UsageError if the source cannot be compiled.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        environment = sandbox.Environment()
        try:
            tree = environment.parse(source)
            _refuse_includes(tree)
            self._compiled = environment.from_string(tree)
            names = meta.find_undeclared_variables(tree)
        except (jinja2.TemplateError, TemplateError, RecursionError) as error:
            raise UsageError(
                "the chat template cannot be compiled", found=str(error).splitlines()[0]
            ) from error
        self._tokens = {
            name: sandbox.MissingToken(name=name) for name in names if name.endswith("_token")
        } | dict(tokens)
        self.has_marks = any(
            node.data == sandbox.BEGIN for node in tree.find_all(nodes.TemplateData)
        )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        prompt: bool = False,
    ) -> Rendered:
        """Return the text of messages. prompt: add the generation prompt at the end.

        Raises TemplateError if the template refuses the messages or exceeds a limit.
        """
        blocks: list[str] = []
        size = 0
        most = _AT_LEAST
        try:
            context = self._compiled.new_context(
                {
                    **self._compiled.globals,
                    **self._tokens,
                    "messages": messages,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": prompt,
                },
                shared=True,
            )
            for block in self._compiled.root_render_func(context):
                blocks.append(block)
                size += len(block)
                if size > most:
                    most = max(most, _FACTOR * _count_characters([messages, tools]))
                    if size > most:
                        raise LimitError(f"it wrote more than {most:,} characters")
            return (
                Rendered(*_extract_marks(blocks))
                if self.has_marks
                else Rendered("".join(blocks), [])
            )
        except TemplateError:
            raise
        except MemoryError:
            raise LimitError("it took more memory than a conversation may") from None
        except Exception as error:  # a template can raise any error
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise TemplateError(lines[0]) from error


def _refuse_includes(tree: nodes.Template) -> None:
    """Raise UsageError if a template includes or imports other templates."""
    foreign = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)
    for node in tree.find_all(foreign):
        raise UsageError(
            "the chat template reads other templates, which is not allowed",
            found=f"{type(node).__name__.lower()} in line {node.lineno}",
        )


def _extract_marks(blocks: Sequence[str]) -> tuple[str, list[Span]]:
    """Remove the markers of generation blocks; return the text and the marked spans."""
    text = "".join([block for block in blocks if block not in (sandbox.BEGIN, sandbox.END)])
    if sandbox.BEGIN in text:  # the template stored a block and wrote it later
        blocks = re.split(f"([{sandbox.BEGIN}{sandbox.END}])", "".join(blocks))
        text = "".join(blocks[::2])
    marks = []
    place = 0
    begin = 0
    for block in blocks:
        if block == sandbox.BEGIN:
            begin = place
        elif block == sandbox.END:
            marks.append((begin, place))
        else:
            place += len(block)
    return text, marks


def _count_characters(value: Any) -> int:
    """Return the number of characters in all strings of nested values."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(len(key) + _count_characters(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return sum(map(_count_characters, value))
    return 8
