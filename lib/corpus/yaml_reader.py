"""Read YAML: one document per YAML document, with aliases and merge keys expanded up to a limit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from lib.core import records
from lib.corpus.documents import DROPPED, DROPPED_REST, TOO_LARGE, Documents
from lib.corpus.encoding import Locator
from lib.corpus.raw_file import RawFile

_MAX_DEPTH = 1024
# Parsed nodes take up to a hundred times the memory of their text.
LARGE = 16_000_000
_GROUP = 2_000_000
# Limits for the expansion of aliases, in characters and nodes. A file of 289 bytes can expand to a
# million strings.
_FREE_EXPANSION = 1_000_000
_EXPANSION_PER_CHARACTER = 10
_TAG = "tag:yaml.org,2002:"


class _UnexpandableDocument(Exception):
    """Raised if a document cannot be expanded. args: the kind of problem and the message."""


class _Merge:
    """Stands for the merge key `<<`."""


def read_yaml(raw: RawFile, documents: Documents) -> None:
    """Add every YAML document up to the first syntax error.

    A large file is cut at lines that start with `---`, so that its nodes fit in memory.
    """
    data = raw.read(LARGE)
    if data is None:
        decoded = raw.decode(documents.fallback)
        texts = _group_documents(decoded)
    else:
        decoded = None
        texts = iter([documents.decode(data)])
    following = next(texts, None)
    locator = Locator("", raw.head)
    while following is not None:
        text = following
        following = next(texts, None)
        if raw.damage and following is None:  # a cut document may still be valid, so it is dropped
            text = text[: text.rfind("\n---") + 1]
        locator.move(locator.end(), text)
        if len(text) > LARGE:
            documents.note(*TOO_LARGE, DROPPED, *locator.at(0))
        elif not _read_text_documents(text, locator, documents):
            break
    if decoded:
        documents.tally.replaced += decoded.replaced
    if raw.damage:
        documents.note("cut", raw.damage, DROPPED_REST, *locator.at(locator.end()))


def _read_text_documents(text: str, locator: Locator, documents: Documents) -> bool:
    """Add the documents in a text; return False after a syntax error."""
    import yaml

    loader = _make_loader(documents.as_data)(text)
    limit = _FREE_EXPANSION + _EXPANSION_PER_CHARACTER * len(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            place = locator.at(node.start_mark.index)
            try:
                value = _AliasExpander(limit).copy(loader.construct_document(node))
                if documents.as_data and isinstance(value, list):  # a list of records, as in JSON
                    for item, child in zip(value, node.value, strict=True):
                        documents.add_value(item, *locator.at(child.start_mark.index))
                else:
                    documents.add_value(value, *place)
            except _UnexpandableDocument as refusal:
                kind, message = refusal.args
                documents.note(kind, message, DROPPED, *place)
            except (yaml.constructor.ConstructorError, RecursionError) as error:
                documents.note(
                    "syntax", f"not valid YAML: {_describe_error(error)}", DROPPED, *place
                )
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        documents.note(
            "syntax",
            f"not valid YAML: {_describe_error(error)}",
            DROPPED_REST,
            *(locator.at(mark.index) if mark else ()),
        )
        return False
    finally:
        loader.dispose()
    return True


def _group_documents(chunks: Iterable[str]) -> Iterator[str]:
    """Yield a text in pieces of a few megabytes, each starting at a line of `---`.

    If a document is too large, only its beginning is yielded and the rest is skipped. That piece is
    larger than LARGE, so the caller reports the document.
    """
    text = ""
    is_skipping = False
    for chunk in chunks:
        text += chunk
        start = text.find("\n---", 0) if is_skipping else text.rfind("\n---", 1)
        if is_skipping:
            text, is_skipping = (text[start + 1 :], False) if start >= 0 else (text[-4:], True)
        elif start >= 0 and len(text) > _GROUP:
            yield text[: start + 1]
            text = text[start + 1 :]
        elif len(text) > 2 * LARGE:
            yield text
            text = text[-4:]
            is_skipping = True
    if text and not is_skipping:
        yield text


def _describe_error(error: Exception) -> str:
    return str(getattr(error, "problem", "") or error).splitlines()[0]


class _AliasExpander:
    """Copies a loaded value to nested dicts and lists without aliases and merge keys."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._open: set[int] = set()

    def copy(self, value: Any, depth: int = 0) -> Any:
        """Return a copy of a value.

        Raises _UnexpandableDocument if it is too large, too deep, or contains itself.
        """
        self._left -= 1 + (len(value) if isinstance(value, str) else 0)
        if self._left < 0:
            raise _UnexpandableDocument("aliases", "aliases expand the document beyond the limit")
        if not isinstance(value, (dict, list)):
            return value
        if id(value) in self._open:
            raise _UnexpandableDocument("aliases", "an alias makes the document contain itself")
        if depth > _MAX_DEPTH:
            raise _UnexpandableDocument("nesting", f"nested more than {_MAX_DEPTH} levels deep")
        self._open.add(id(value))
        if isinstance(value, list):
            result: Any = [self.copy(item, depth + 1) for item in value]
        else:
            result = self._merge(value, depth)
            result |= {
                key: self.copy(item, depth + 1) for key, item in value.items() if key is not _Merge
            }
        self._open.discard(id(value))
        return result

    def _merge(self, mapping: dict, depth: int) -> dict:
        """Return the entries from the merge key; the first of several mappings takes precedence."""
        merged: dict = {}
        bases = mapping.get(_Merge, [])
        for base in reversed(bases if isinstance(bases, list) else [bases]):
            if isinstance(base, dict):
                merged |= self.copy(base, depth + 1)
        return merged


@lru_cache(maxsize=2)
def _make_loader(as_data: bool) -> type:
    """Return a loader class (of libyaml if available) that produces strings, dicts and lists.

    Every other scalar becomes a tuple (tag, text), so that it is not read as text but can be a key.
    Nothing is converted, so no date, number or unknown tag can fail. as_data: convert numbers,
    booleans and null, and return other scalars as their text.
    """
    import yaml

    safe: Any = records.yaml_loader()

    class PlainLoader(safe):
        def flatten_mapping(self, node: Any) -> None:
            """Do nothing: _AliasExpander expands merge keys, with a limit."""

    def scalar(loader: Any, node: Any) -> tuple[str, str]:
        return node.tag, node.value

    def string(loader: Any, node: Any) -> str:
        return node.value

    def any_tag(loader: Any, node: Any) -> Any:
        if isinstance(node, yaml.ScalarNode):
            return node.value
        construct = (
            PlainLoader.construct_yaml_seq
            if isinstance(node, yaml.SequenceNode)
            else PlainLoader.construct_yaml_map
        )
        return construct(loader, node)

    def plain(loader: Any, node: Any) -> Any:
        kind = node.tag.removeprefix(_TAG)
        try:
            return getattr(loader, f"construct_yaml_{kind}")(node)
        except (ValueError, KeyError, IndexError, OverflowError):  # such as `!!int x`
            return node.value

    for name in ("int", "float", "bool", "null"):
        PlainLoader.add_constructor(_TAG + name, plain if as_data else scalar)
    for name in ("timestamp", "binary"):
        PlainLoader.add_constructor(_TAG + name, string if as_data else scalar)
    PlainLoader.add_constructor(_TAG + "str", string)
    PlainLoader.add_constructor(_TAG + "merge", lambda loader, node: _Merge)
    for name in ("omap", "pairs", "set"):
        PlainLoader.add_constructor(_TAG + name, any_tag)
    PlainLoader.add_constructor(None, any_tag)
    return PlainLoader
