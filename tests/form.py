"""Find violations of the rules of form that the formatter does not check, in a module's syntax."""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

# Functions and names by which a text or a list may be multiplied, besides numbers and arithmetic.
_COUNTING = {"dim", "get_world_size", "len", "max", "randint", "randrange"}
_COUNTS = {
    "count",
    "DEEP",
    "depth",
    "LIMIT",
    "most",
    "number",
    "pieces",
    "ranks",
    "size",
    "st_size",
}
_EFFECTS = {"add", "append", "clear", "extend", "pop", "print", "remove", "rmtree", "sleep"}
# Verbs that say too little without a noun: `run_stage`, not `run`. Not `train`, by which `commands`
# names a stage, like `python` and `shell`; not `main` and `parse`, which each script defines.
_BARE_VERBS = {
    *("build", "check", "choose", "fail", "fill", "find", "load", "make", "plan", "prepare"),
    *("read", "refuse", "render", "run", "save", "start", "stop", "write"),
}
# The same for private functions. A public one may be called by its module: `retry.poll`.
_BARE_PRIVATE_VERBS = _BARE_VERBS | {
    *("align", "answer", "call", "close", "collect", "compare", "compose", "compute", "convert"),
    *("copy", "count", "delete", "describe", "divide", "download", "drain", "escape", "estimate"),
    *("evaluate", "execute", "expand", "explain", "extract", "format", "get", "join", "keep"),
    *("kill", "list", "measure", "merge", "mix", "normalize", "open", "overwrite", "parse", "plot"),
    *("print", "prune", "publish", "quote", "replace", "report", "restore", "revert", "review"),
    *("search", "select", "send", "serve", "share", "shorten", "sort", "split", "summarize"),
    *("train", "try", "update", "validate", "verify", "wait", "warn", "widen"),
}
# Verbs by which the docstring of a function begins, but not that of a class: "Reads the parts".
_IMPERATIVES = _BARE_PRIVATE_VERBS | {
    *("add", "append", "average", "contain", "decode", "define", "fill", "follow", "hold", "make"),
    *("map", "name", "receive", "remember", "remove", "return", "store", "sum", "walk", "yield"),
}
# Pronouns and participles that name no value. Not `found`, which is a field of errors.
_NO_NOUNS = {
    *("asked", "each", "given", "how", "kept", "made", "own", "said", "there", "told", "wanted"),
    *("what", "whole"),
}


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


def products_with_flags(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines that multiply by a truth value, or a text or list by anything but a count."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            for one, other in ((node.left, node.right), (node.right, node.left)):
                if _is_flag(other) or (_is_sequence(one) and not _is_count(other)):
                    yield node.lineno
                    break


def _is_sequence(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    return is_text or isinstance(node, (ast.JoinedStr, ast.List, ast.Tuple))


def _is_flag(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    name = _last_name(node.func) if isinstance(node, ast.Call) else _last_name(node)
    return isinstance(node, ast.Compare) or name == "bool" or name.startswith(("is_", "has_"))


def _is_count(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    if isinstance(node, ast.Call):
        return _last_name(node.func) in _COUNTING
    return isinstance(node, ast.BinOp) or _last_name(node) in _COUNTS


def _last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, "" for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def lambdas_with_effects(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines of lambdas that change something and return something else."""
    for node in nodes:
        if isinstance(node, ast.Lambda):
            parts: list[ast.expr] = []
            for part_of_body in ast.walk(node.body):
                if isinstance(part_of_body, ast.Tuple):
                    parts += part_of_body.elts
                elif isinstance(part_of_body, ast.BoolOp):
                    parts += part_of_body.values
            calls = [part for part in parts if isinstance(part, ast.Call)]
            if any(_last_name(call.func) in _EFFECTS for call in calls):
                yield node.lineno


def bare_verbs(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines of a module's functions, except fixtures, whose name is a verb alone."""
    [module] = nodes[:1]
    for node in module.body if isinstance(module, ast.Module) else ():
        if not isinstance(node, ast.FunctionDef):
            continue
        verbs = _BARE_PRIVATE_VERBS if node.name.startswith("_") else _BARE_VERBS
        if node.name.lstrip("_") in verbs:
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not any("fixture" in decorator for decorator in decorators):
                yield node.lineno


def imperative_classes(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines of classes whose docstring begins in the imperative, as a function's does."""
    for node in nodes:
        text = ast.get_docstring(node) if isinstance(node, ast.ClassDef) else None
        if text and text.split()[0].lower() in _IMPERATIVES:
            yield node.lineno


def names_without_noun(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the lines that name a value by a pronoun or participle; fields may have such a name."""
    fields: set[ast.expr] = set()
    for node in nodes:  # a class comes before its fields
        if isinstance(node, ast.Name):
            if node.id in _NO_NOUNS and isinstance(node.ctx, ast.Store) and node not in fields:
                yield node.lineno
        elif isinstance(node, ast.arg):
            if node.arg in _NO_NOUNS:
                yield node.lineno
        elif isinstance(node, ast.ClassDef):
            fields |= {part.target for part in node.body if isinstance(part, ast.AnnAssign)}


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
    "products with truth values": products_with_flags,
    "lambdas with effects": lambdas_with_effects,
    "functions with a bare verb": bare_verbs,
    "classes with an imperative": imperative_classes,
    "values without a noun": names_without_noun,
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
