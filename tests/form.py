"""Find violations of the rules of form that the formatter does not check, in a module's syntax."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path


def unrelated_assignments(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines that assign several values to several names, or one constant to several.

    Three cases are allowed: a swap, a tuple in which a value needs the old value of another target,
    and a tuple that gets a name: `RED, BLUE = COLOURS = ("red", "blue")`.
    """
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        target = node.targets[0]
        if len(node.targets) > 1:
            if isinstance(node.value, ast.Constant):
                yield node.lineno
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(node.value, ast.Tuple):
            parts = [*target.elts, *node.value.elts]
            is_unpacking = any(isinstance(part, ast.Starred) for part in parts)
            if not is_unpacking and not _depends_on_targets(target.elts, node.value.elts):
                yield node.lineno


def _depends_on_targets(targets: list[ast.expr], values: list[ast.expr]) -> bool:
    """Return whether a value contains one of the other targets."""
    names = [ast.unparse(target) for target in targets]
    return any(
        ast.unparse(node) in names and ast.unparse(node) != names[number]
        for number, value in enumerate(values)
        for node in ast.walk(value)
        if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript))
    )


def nested_conditions(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines of conditional expressions that are a branch of another one."""
    for node in nodes:
        if isinstance(node, ast.IfExp) and ast.IfExp in (type(node.body), type(node.orelse)):
            yield node.lineno


def indexed_literals(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines that index a literal, or slice with a condition as a bound."""
    for node in nodes:
        if isinstance(node, ast.Subscript) and _is_sequence(node.value):
            is_unpacked = any(
                isinstance(part, ast.Starred) for part in ast.iter_child_nodes(node.value)
            )
            is_shortened = isinstance(node.value, ast.JoinedStr) and isinstance(
                node.slice, ast.Slice
            )
            if not is_unpacked and not is_shortened:
                yield node.lineno
        if isinstance(node, ast.Slice):
            bounds = (node.lower, node.upper, node.step)
            if any(isinstance(bound, (ast.IfExp, ast.Compare)) for bound in bounds):
                yield node.lineno


def _is_sequence(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def continued_lines(text: str) -> Iterator[int]:
    """Yield the lines of code that end with a backslash, without those in multi-line texts."""
    if "\\\n" not in text:
        return
    in_texts: set[int] = set()
    first = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        name = tokenize.tok_name[token.type]
        if name == "FSTRING_START":  # from Python 3.12 on
            first = token.start[0]
        if name == "STRING":
            in_texts |= {*range(token.start[0], token.end[0])}
        elif name == "FSTRING_END":
            in_texts |= {*range(first, token.end[0])}
        elif name == "COMMENT":
            in_texts.add(token.start[0])
    for number, line in enumerate(text.splitlines(), 1):
        if line.endswith("\\") and number not in in_texts:
            yield number


# The searches by the name of their rule.
RULES: dict[str, Callable[[Sequence[ast.AST]], Iterator[int]]] = {
    "assignments of unrelated values": unrelated_assignments,
    "nested conditional expressions": nested_conditions,
    "literals with an index": indexed_literals,
}
BACKSLASHES = "backslashes"


@functools.cache
def parse_text(text: str) -> ast.Module:
    """Return the syntax tree of a module, which many tests look at."""
    return ast.parse(text)


def parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file; see `parse_text`."""
    return parse_text(path.read_text(encoding="utf-8"))


def violations(text: str) -> Iterator[tuple[str, int]]:
    """Yield (rule, line) for each violation in the text of a module."""
    nodes = [*ast.walk(parse_text(text))]
    for rule, search in RULES.items():
        yield from ((rule, line) for line in search(nodes))
    yield from ((BACKSLASHES, line) for line in continued_lines(text))
