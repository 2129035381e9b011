"""Parse XML without the features that make it dangerous."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from xml.parsers import expat

from lib.corpus.extract.extracted import DAMAGED, Refusal

DEEPEST = 1_000  # the deepest nesting of elements; Word nests about twenty


class XmlHandler:
    """Receives the events of `parse_xml`. Subclasses override the methods that they need.

    Names are without their namespace: documents use various prefixes, and Office has two sets of
    namespaces for the same elements.
    """

    def start(self, name: str, attributes: Mapping[str, str]) -> None:
        """Receive the start of an element."""

    def end(self, name: str) -> None:
        """Receive the end of an element."""

    def text(self, data: str) -> None:
        """Receive characters; a text may arrive in several pieces."""


def parse_xml(data: bytes, name: str, handler: XmlHandler) -> None:
    """Pass the events of an XML document to a handler. name: of the document, for messages.

    Raises Refusal if the document is not well-formed, declares entities or nests too deeply. So no
    entity is expanded, and no other file is read.
    """
    depth = 0

    def start(element: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > DEEPEST:
            raise Refusal(DAMAGED, f"{name}: elements are nested more than {DEEPEST:,} deep")
        handler.start(
            _strip_namespace(element),
            {_strip_namespace(key): value for key, value in attributes.items()},
        )

    def end(element: str) -> None:
        nonlocal depth
        depth -= 1
        handler.end(_strip_namespace(element))

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = handler.text
    parser.EntityDeclHandler = _make_refuser(name)
    parser.ExternalEntityRefHandler = _make_refuser(name)
    parser.buffer_text = True
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        raise Refusal(DAMAGED, f"{name} is not well-formed XML: {error}") from None


def _strip_namespace(name: str) -> str:
    return name.rpartition(" ")[2]


def _make_refuser(name: str) -> Callable[..., Any]:
    def refuse(*_: object) -> None:
        raise Refusal(DAMAGED, f"{name} declares entities, which documents of this kind never do")

    return refuse
