# covers: lib/core/help_text.py, lib/core/declared.py, lib/core/options.py
"""What every command says of its options, and that it reads each of them."""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import io
import re
from pathlib import Path

import pytest

from lib.core import declared, help_text, options
from lib.core.errors import UsageError
from lib.optim.optimizers import OPTIMIZERS, list_option_classes
from lib.train.config import Config
from tests import form
from tests.scripts import load_script
from tests.test_repository import ROOT, STAGES, name_of

TOOLS = [
    ROOT / "lib/checkpoints/__main__.py",
    ROOT / "launch/bundles/bundle.py",
    ROOT / "launch/checks/network.py",
    ROOT / "launch/checks/setup.py",
    ROOT / "launch/cloud/kube/cluster.py",
    ROOT / "launch/cloud/kube/setup.py",
    *sorted((ROOT / "tests/demo").glob("*.py")),
    *(
        path
        for path in sorted((ROOT / "launch").glob("*.py"))
        if path.stem not in ("__init__", "torchrun")
    ),
    ROOT / "launch/cloud/pod.py",
    ROOT / "launch/cloud/prepare.py",
]  # torch's own options
COMMANDS = [*STAGES, *TOOLS]
# What a parser of its own reads before the others.
READ_FIRST = {"config", "values"}
# What a namespace of options is called, out of launch/.
NAMES = {
    "row_options",
    "opts",
    "_opts",
    "options",
    "arguments",
    "typed_config",
    "config",
    "_config",
    "build",
    "_patience",
    "patience",
}


class Made(Exception):
    """Carries a parser out of the command that made it."""


@functools.cache
def parser_of(path: Path) -> argparse.ArgumentParser:
    """Return the parser of a command."""

    def hand_out(self: argparse.ArgumentParser, *ignored: object) -> None:
        raise Made(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Made) as caught:
        patch.setattr(options.Parser, "parse", hand_out)
        patch.setattr(argparse.ArgumentParser, "parse_args", hand_out)
        module = load_script(path)
        getattr(module, "parse", getattr(module, "main", None))(["unpack"])
    return caught.value.args[0]


def actions_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options and arguments of a parser, and those of its verbs."""
    actions = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions += [a for verb in action.choices.values() for a in actions_of(verb)]
        elif action.default is not argparse.SUPPRESS:
            actions.append(action)
    return actions


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_every_option_has_help_that_ends_with_its_default(path: Path) -> None:
    actions = actions_of(parser_of(path))
    assert actions and not [action.dest for action in actions if not (action.help or "").strip()]
    help_texts = {
        action.option_strings[0]: help_text.with_default(action)
        for action in actions
        if action.option_strings
    }
    assert not {
        flag: text
        for flag, text in help_texts.items()
        if not re.search(r"\((default: .+|required.*)\)$", text)
    }


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_the_usage_is_one_line(path: Path) -> None:
    parser = parser_of(path)
    if isinstance(parser, options.Parser):
        usage, empty = parser.format_help().splitlines()[:2]
        assert usage.startswith("usage: ") and not empty
        assert len(usage) <= 100 and "[options]" in usage


def test_the_help_of_training_is_a_page_and_all_of_it_can_be_had() -> None:
    parser = parser_of(STAGES[3])
    page = parser.format_help()
    everything = parser.format_all()
    assert len(page.splitlines()) <= 24 and max(map(len, page.splitlines())) <= 80
    flags = [action.option_strings[0] for action in parser._actions]
    lines = [line for line in page.splitlines() if line.split(" ")[2:3] and line.startswith("  -")]
    assert len(lines) == len(declared.first_page(Config)) == 10
    assert all(re.search(r"\((default: .+|required)\)$", line) for line in lines)
    assert "--help-all" in page and not [flag for flag in flags if flag not in everything]
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit):
        parser.parse(["--help-all"])  # to the standard output, for a pager or grep
    assert printed.getvalue() == everything
    with pytest.raises(UsageError) as refused:
        parser.parse(["-e", "x", "-d", "y", "--log-every", "3"])
    assert refused.value.run.endswith(" --help-all")  # the page has ten options only
    assert {*declared.first_page(Config)} <= {action.dest for action in parser._actions}


@functools.cache
def imports_of(path: Path) -> set[Path]:
    """Return the modules of ours that a file imports, also lazily."""
    names = {
        name
        for node in ast.walk(form.parse_file(path))
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] in ("lib", "launch")
        for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    }
    files = {ROOT.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return {file for file in files if file.is_file()}


# The modules that a module imports by their names.
NAMED = {ROOT / "lib/optim/registry.py": {ROOT / f"lib/optim/{name}.py" for name in OPTIMIZERS}}


def imported(path: Path) -> set[Path]:
    """Return the modules of ours that a script imports, lazily or through others, and itself."""
    seen: set[Path] = set()
    queue = {path}
    while queue:
        path = queue.pop()
        seen.add(path)
        queue |= (imports_of(path) | NAMED.get(path, set())) - seen
    return seen


def last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, "" for another expression."""
    return getattr(node, "attr", "") or getattr(node, "id", "")


@functools.cache
def reads(path: Path) -> set[str]:
    """Return the names of options that a module reads, those it names in a string too.

    What the options are called differs in launch/: there an attribute of anything counts.
    """
    nodes = list(ast.walk(form.parse_file(path)))
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and ("launch" in path.parts or last_name(node.value) in NAMES)
    }
    return attributes | {
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("path", COMMANDS, ids=name_of)
def test_every_option_is_read_somewhere(path: Path) -> None:
    read = {
        name for file in imported(path) - {ROOT / "lib/core/options.py"} for name in reads(file)
    }
    assert not {action.dest for action in actions_of(parser_of(path))} - read - READ_FIRST


# What a Config is called, in the modules that import it or what has one.
CONFIG = {
    "auto",
    "config",
    "typed_config",
    "plan.config",
    "run.config",
    "self.config",
    "self.plan.config",
    "self._plan.config",
}
HOLDERS = {"Config", "Plan", "TrainState"}


def test_each_field_of_config_has_a_role_and_is_read_and_nothing_else_is() -> None:
    fields = {field.name: field.metadata for field in declared.list_fields(Config)}
    assert not [name for name, about in fields.items() if about["role"] is None]
    assert not [
        name
        for name, about in fields.items()
        if about["quiet"] and about["role"] is not declared.Role.RESULT
    ]
    read = set()
    named = set()
    for path in (STAGES[3], *(ROOT / "lib/train").rglob("*.py")):
        nodes = list(ast.walk(form.parse_file(path)))
        if path.name == "config.py" or not any(
            isinstance(node, ast.alias) and node.name in HOLDERS for node in nodes
        ):
            continue
        read |= {
            node.attr
            for node in nodes
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in CONFIG
        }
        named |= {
            node.value
            for node in nodes
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    # Each optimizer reads its own options.
    fields_of_options = {
        field.name for kind in list_option_classes() for field in declared.list_fields(kind)
    }
    assert not fields_of_options - {
        name for path in (ROOT / "lib/optim").glob("*.py") for name in reads(path)
    }
    assert not fields.keys() - read - named - READ_FIRST - fields_of_options
    assert not read - set(dir(Config)) - Config.__dataclass_fields__.keys()
