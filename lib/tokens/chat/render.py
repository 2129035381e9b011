"""Render chat templates in Jinja's sandbox, with limits on time, memory and size.

Templates come with the model from the Hub, so they are untrusted code. A template sees plain JSON
values and the functions below. It sees no files, no attributes that begin with an underscore, no
clock and no randomness.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import jinja2.utils
from jinja2 import meta, nodes

from lib.core.conversation import Message
from lib.core.errors import UsageError

Span = tuple[int, int]  # of characters, the end exclusive

SECONDS = 5  # of processor time for one conversation
MEMORY = 1 << 30  # bytes of address space that rendering may add
# A rendered text may have _FACTOR times the characters of its content, and always _AT_LEAST.
_FACTOR = 64
_AT_LEAST = 1 << 20
_LARGEST_BITS = 1 << 12  # bits of a number that a template computes
_MOST_PLACES = 50  # decimal places of `round`
# Markers around a `{% generation %}` block: lone surrogates, so no valid text contains them.
BEGIN = "\udc80"
END = "\udc81"
_STATUS = Path("/proc/self/statm")
_TODAY = datetime(2024, 7, 26)  # the rendered text must not depend on the day


class TemplateError(Exception):
    """Raised if a conversation cannot be rendered, with the template's own message if any."""


class LimitError(TemplateError):
    """Raised if a template exceeds the limits on time, memory or length for one conversation."""


class TokenError(TemplateError):
    """Raised if a template writes a special token that the tokenizer lacks."""


class Rendered(NamedTuple):
    """Holds a rendered text and the spans that its template marks as the assistant's."""

    text: str
    marks: list[Span]


class Template:
    """Renders conversations with a chat template.

    source: the Jinja source. tokens: the special tokens that it may use, such as `bos_token`.
    Raises UsageError if the source cannot be compiled, and LimitError if that exceeds a limit.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        self.source = source
        environment = _Environment()
        try:
            tree = environment.parse(source)
            _refuse_includes(tree)
            self._compiled = environment.from_string(tree)
            names = meta.find_undeclared_variables(tree)
        except LimitError:
            raise
        except (jinja2.TemplateError, TemplateError, RecursionError) as error:
            raise UsageError(
                "the chat template cannot be compiled", found=str(error).splitlines()[0]
            ) from error
        self._tokens = {
            name: _MissingToken(name=name) for name in names if name.endswith("_token")
        } | dict(tokens)
        self.has_marks = any(node.data == BEGIN for node in tree.find_all(nodes.TemplateData))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the text of messages.

        prompt: add the generation prompt at the end. variables: further variables of the template.

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
                    "documents": None,
                    **(variables or {}),
                    "messages": messages,
                    "tools": tools,
                    "add_generation_prompt": prompt,
                },
                shared=True,
            )
            for block in self._compiled.root_render_func(context):
                blocks.append(block)
                size += len(block)
                if size > most:
                    most = max(most, _FACTOR * _count_characters([messages, tools, variables]))
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


@contextmanager
def limit_rendering() -> Iterator[Callable[[], None]]:
    """Limit memory in the `with` block, and yield a function that restarts the time limit.

    The time is processor time. Call the function before each conversation. A conversation that
    exceeds the time raises LimitError; this works in the main thread only. Exceeding the memory
    raises MemoryError.
    """
    if threading.current_thread() is not threading.main_thread():
        with limit_memory():
            yield lambda: None
        return

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise LimitError(f"it took more than {SECONDS} seconds")

    def restart() -> None:
        # Processor time of this process, so a busy machine changes nothing. The timer counts from
        # now. RLIMIT_CPU counts from the start of the process by a clock that no one can read:
        # it may be seconds ahead of `process_time`. The signal is repeated every second, since
        # code that catches the error may go on.
        signal.setitimer(signal.ITIMER_PROF, SECONDS, 1)

    before = signal.signal(signal.SIGPROF, stop)
    try:
        with limit_memory():
            try:
                yield restart
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)  # again, if the signal came just before the first
        signal.signal(signal.SIGPROF, before)


@contextmanager
def limit_memory(added: int = MEMORY) -> Iterator[None]:
    """Limit the address space of this process to `added` bytes more than now (on Linux)."""
    if not _STATUS.is_file():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(_STATUS.read_text(encoding="ascii").split()[0])
    limits = [pages * resource.getpagesize() + added, soft, hard]
    lowest = min(limit for limit in limits if limit != resource.RLIM_INFINITY)
    resource.setrlimit(resource.RLIMIT_AS, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Extends Jinja's sandbox with the names that transformers (5.17 to 5.23) gives templates."""

    # Jinja computes other operations on constants when it compiles a template.
    intercepted_binops = frozenset(["**", "*", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _write_json
        self.filters["round"] = _round_number
        for name in ("random", "urlize", "pprint"):
            self.filters.pop(name)
        self.globals.pop("lipsum")
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _TODAY.strftime,
            "namespace": _Namespace,
            "dict": lambda *pairs, **items: dict(*pairs, **items),
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Refuse to compute huge numbers: no signal interrupts a long computation in C."""
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            bits = [max(1, abs(int(value)).bit_length()) for value in (left, right)]
            size = bits[0] * abs(int(right)) if operator == "**" else sum(bits)
            if size > _LARGEST_BITS:
                raise LimitError(f"it computes something too large with {operator}")
        return super().call_binop(context, operator, left, right)


class _Generation(jinja2.ext.Extension):
    """Puts BEGIN and END around text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Any) -> list[Any]:
        """Return the nodes of a generation block with BEGIN and END around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [nodes.Output([nodes.TemplateData(mark)], lineno=line) for mark in (BEGIN, END)]
        return [edges[0], nodes.Scope(body, lineno=line), edges[1]]


class _MissingToken(jinja2.Undefined):
    """Stands for a token that the tokenizer lacks: a template may test for it, but not write it."""

    def _fail(self, *_: Any) -> NoReturn:
        raise TokenError(f"it writes {self._undefined_name}, which the tokenizer lacks")

    __str__ = __add__ = __radd__ = _fail


class _Namespace(jinja2.utils.Namespace):
    """Holds the variables of a template, and refuses names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self = args[0]
        values = dict(*args[1:], **kwargs)
        for name in values:
            _require_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(
            f"it stores {name!r}, and names with an underscore in front are not allowed"
        )


def _raise_exception(message: object = "") -> NoReturn:
    raise TemplateError(str(message) or "it calls raise_exception")


def _write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as transformers writes it; Jinja's own filter would escape HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _round_number(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > _MOST_PLACES:  # Jinja computes 10 to that power
        raise LimitError(f"it rounds to more than {_MOST_PLACES} places")
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


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
    text = "".join([block for block in blocks if block not in (BEGIN, END)])
    if BEGIN in text:  # the template stored a block and wrote it later
        blocks = re.split(f"([{BEGIN}{END}])", "".join(blocks))
        text = "".join(blocks[::2])
    marks = []
    place = 0
    begin = 0
    for block in blocks:
        if block == BEGIN:
            begin = place
        elif block == END:
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
