"""What runs a chat template: Jinja without reach, within limits of time and memory.

A template is text that somebody else wrote. It sees plain JSON values and the functions below, no
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
ROOM = 1 << 30  # bytes of address space beyond what the process has when rendering begins
# What `{% generation %}` leaves in a text until it is read: lone surrogates, which UTF-8 cannot
# encode.
BEGIN = "\udc80"
END = "\udc81"
_STATUS = Path("/proc/self/statm")
_TODAY = datetime(2024, 7, 26)  # what is rendered must not depend on the day
_WIDE = re.compile(r"%[^%a-zA-Z]*(\d{5}|\*)")
_LONGEST = 1 << 24  # of what is repeated, and of bits of a number
_NAMES_OF_DICTS = frozenset(dir(dict))
_METHODS_OF_STRINGS = frozenset(name for name in dir(str) if name[0] != "_") - {
    "format",
    "format_map",
}


class TemplateError(Exception):
    """Says why a conversation could not be rendered, in the template's own words if it raised."""


class LimitError(TemplateError):
    """Says that a template took more time or memory, or wrote more, than a conversation may."""


class TokenError(TemplateError):
    """Says that a template writes a special token that the tokenizer has not."""


class Lacking(jinja2.Undefined):
    """Stands for a token that the tokenizer has not: it may be asked for, and not be written."""

    def _fail(self, *_: Any) -> NoReturn:
        raise TokenError(f"it writes {self._undefined_name}, which the tokenizer has not")

    __str__ = __add__ = __radd__ = _fail


class Generation(jinja2.ext.Extension):
    """Puts BEGIN and END around text between `{% generation %}` and `{% endgeneration %}`."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: Any) -> list[Any]:
        """Return the nodes of such a block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        edges = [
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)
            for mark in (BEGIN, END)
        ]
        return [edges[0], jinja2.nodes.Scope(body, lineno=line), edges[1]]


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Is Jinja's sandbox with what templates expect of transformers (5.17 to 5.23)."""

    intercepted_binops = frozenset(["**", "*", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
        )
        self.filters["tojson"] = _tojson
        self.filters["round"] = _round
        for name in ("random", "urlize", "pprint"):
            self.filters.pop(name)
        self.globals.pop("lipsum")
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": _TODAY.strftime,
            "namespace": _Namespace,
            "dict": lambda *pairs, **items: dict(*pairs, **items),
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute, or the item of that name, as Jinja does; the usual ones faster."""
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
        """Return an item, as Jinja does; that of a message faster."""
        if type(obj) is dict and type(argument) is str and argument in obj:
            return obj[argument]
        return super().getitem(obj, argument)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function of a template if that is safe."""
        if (
            type(obj) is BuiltinMethodType
            and type(obj.__self__) is str
            and obj.__name__ in _METHODS_OF_STRINGS
        ):
            kwargs.pop("_loop_vars", None)  # which Jinja hands on
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Multiply and format within bounds: what C code computes no signal interrupts."""
        if operator == "%":
            if isinstance(left, str) and _WIDE.search(left):
                raise LimitError("it formats with a width of more than four digits")
            return super().call_binop(context, operator, left, right)
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            bits = [max(1, abs(int(each)).bit_length()) for each in (left, right)]
            size = bits[0] * abs(int(right)) if operator == "**" else sum(bits)
            is_too_large = size > 1 << 12
        else:
            is_too_large = _factor(left) * _factor(right) > _LONGEST
        if is_too_large:
            raise LimitError(f"it computes something too large with {operator}")
        return super().call_binop(context, operator, left, right)


def _factor(operand: Any) -> int:
    """Return by how much an operand enlarges a product: a number itself, a text its length."""
    if isinstance(operand, int):
        return operand
    return len(operand) if hasattr(operand, "__len__") else 1


class _Namespace(jinja2.utils.Namespace):
    """Holds variables of a template, none of which begins with an underscore."""

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


def _raise(message: object = "") -> NoReturn:
    raise TemplateError(str(message) or "it calls raise_exception")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers does: Jinja's own filter escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if abs(precision) > 50:  # 10 to that power is computed
        raise LimitError("it rounds to more than 50 places")
    return jinja2.filters.do_round(value, precision, method)  # type: ignore[arg-type]


@contextmanager
def limited() -> Iterator[Callable[[], None]]:
    """Bound the memory of what is done, and yield what begins the time of one conversation anew.

    What takes longer raises LimitError, where this thread can be interrupted; what takes more
    memory, MemoryError.
    """
    if threading.current_thread() is not threading.main_thread():
        with limit_memory():
            yield lambda: None
        return

    def stop(_: int, __: FrameType | None) -> NoReturn:
        raise LimitError(f"it took more than {SECONDS:g} seconds")

    def begin() -> None:
        # Of this process, so that a busy machine changes nothing; again and again, since what
        # catches it may go on.
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
    """Allow this process `room` more bytes of address space than it has now (on Linux)."""
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
