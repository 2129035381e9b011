"""Run chat templates in a Jinja sandbox with limits on time and memory.

A chat template is untrusted code. It sees plain JSON values and the functions below. It sees no
files, no attributes that begin with an underscore, no clock and no randomness.
"""

from __future__ import annotations

import json
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import BuiltinMethodType, FrameType
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils

SECONDS = 5.0  # for one conversation
ROOM = 1 << 30  # bytes of address space that rendering may add
# Markers around a `{% generation %}` block: lone surrogates, so no valid text contains them.
BEGIN = "\udc80"
END = "\udc81"
_STATUS = Path("/proc/self/statm")
_TODAY = datetime(2024, 7, 26)  # the rendered text must not depend on the day
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_LONGEST = 1 << 24  # characters or items of a product
_NAMES_OF_DICTS = frozenset(dir(dict))
_METHODS_OF_STRINGS = frozenset(name for name in dir(str) if name[0] != "_") - {
    "format",
    "format_map",
}


class TemplateError(Exception):
    """Raised if a conversation cannot be rendered, with the template's own message if any."""


class LimitError(TemplateError):
    """Raised if a template exceeds the limits on time, memory or length for one conversation."""


class TokenError(TemplateError):
    """Raised if a template writes a special token that the tokenizer lacks."""


class MissingToken(jinja2.Undefined):
    """Stands for a token that the tokenizer lacks: a template may test for it, but not write it."""

    def _fail(self, *_: Any) -> NoReturn:
        raise TokenError(f"it writes {self._undefined_name}, which the tokenizer has not")

    __str__ = __add__ = __radd__ = _fail


class Generation(jinja2.ext.Extension):
    """Puts BEGIN and END around text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Any) -> list[Any]:
        """Return the nodes of a generation block with BEGIN and END around its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)
            for mark in (BEGIN, END)
        ]
        return [edges[0], jinja2.nodes.Scope(body, lineno=line), edges[1]]


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Extends Jinja's sandbox with what transformers (5.17 to 5.23) gives templates."""

    intercepted_binops = frozenset(["**", "*", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
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

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, or the item of that name, as Jinja does, but faster."""
        kind = type(obj)
        if kind is dict:
            if attribute not in _NAMES_OF_DICTS:
                return (
                    obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
                )
        elif kind is str and attribute in _METHODS_OF_STRINGS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Return an item as Jinja does, with a faster path for messages."""
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function that a template names, if that is safe."""
        if (
            type(obj) is BuiltinMethodType
            and type(obj.__self__) is str
            and obj.__name__ in _METHODS_OF_STRINGS
        ):
            kwargs.pop("_loop_vars", None)  # Jinja adds these two arguments
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply and format within bounds, since no signal interrupts an operation in C code."""
        if operator == "%":
            if isinstance(left, str) and _WIDE.search(left):
                raise LimitError("it formats with a width of more than four digits")
            return super().call_binop(context, operator, left, right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            bits = [max(1, abs(int(each)).bit_length()) for each in (left, right)]
            size = bits[0] * abs(int(right)) if operator == "**" else sum(bits)
            is_too_large = size > 1 << 12
        else:
            is_too_large = _find_factor(left) * _find_factor(right) > _LONGEST
        if is_too_large:
            raise LimitError(f"it computes something too large with {operator}")
        return super().call_binop(context, operator, left, right)


def _find_factor(operand: Any) -> int:
    """Return the size that an operand adds to a product: a number, or the length of a text."""
    if isinstance(operand, int):
        return operand
    return len(operand) if hasattr(operand, "__len__") else 1


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
    if abs(precision) > 50:  # Jinja computes 10 to that power
        raise LimitError("it rounds to more than 50 places")
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


@contextmanager
def limit_rendering() -> Iterator[Callable[[], None]]:
    """Limit memory in the `with` block, and yield a function that restarts the timer.

    Call the function before each conversation. A conversation that exceeds the time raises
    LimitError; this works in the main thread only. Exceeding the memory raises MemoryError.
    """
    if threading.current_thread() is not threading.main_thread():
        with limit_memory():
            yield lambda: None
        return

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise LimitError(f"it took more than {SECONDS:g} seconds")

    def begin() -> None:
        # CPU time of this process, so a busy machine changes nothing. The signal repeats, since
        # code that catches the error may go on.
        signal.setitimer(signal.ITIMER_PROF, SECONDS, SECONDS)

    before = signal.signal(signal.SIGPROF, stop)
    try:
        with limit_memory():
            yield begin
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@contextmanager
def limit_memory(room: int = ROOM) -> Iterator[None]:
    """Limit the address space of this process to `room` bytes more than now (on Linux)."""
    if not _STATUS.is_file():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(_STATUS.read_text(encoding="ascii").split()[0])
    bounds = [
        pages * resource.getpagesize() + room,
        *(each for each in (soft, hard) if each != resource.RLIM_INFINITY),
    ]
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
