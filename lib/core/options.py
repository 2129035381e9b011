"""Command-line options that a YAML file can also set.

Order of precedence: command line, then `--config run.yaml`, then the default. `--src-dir` and
`--src_dir` are the same option, on the command line and in YAML. So are the aliases of an option,
which are names for it in other trainers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from lib.core import commands, config_file, help_text, unknown_options
from lib.core.commands import REDACTED, is_secret
from lib.core.conversation import RESERVED_KWARGS
from lib.core.errors import TYPED_AS, Problems, StageError, UsageError, combine_errors

Options = argparse.Namespace
AUTO = "auto"  # the value of options that a stage replaces by another one
OFF = "off"

# Options that do not affect the result, so they are not part of an artifact's identity.
VOLATILE = {"config", "dry_run", "overwrite", "num_workers", "no_progress"}


# Options about raw files, whose names may hold any bytes.
_ANY_BYTES = {"src_dir", "data_folder", "include", "exclude"}
_HELP = {"--help", "--help-all"}  # a file with one would end the command with exit code 0
_NAME_IN_UTF8 = "a name in UTF-8: rename the file or directory, or copy it to one with such a name"
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


class Parser(argparse.ArgumentParser):
    """Accepts --src-dir and --src_dir, reads YAML, and suggests the nearest option in errors.

    usage: the words after the script's name (default: required options, and `[options]`). first:
    the purposes of the most important options, with destinations of argparse as keys. If it is
    given, --help prints a short page, and --help-all prints every option.
    """

    def __init__(
        self, description: str | None, usage: str = "", first: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(
            description=description, formatter_class=help_text.Formatter, allow_abbrev=False
        )
        self._usage = usage
        self._first = first or {}
        self._bad: list[str] = []  # errors about values, reported together
        if first:
            self.add_argument(
                "--help-all",
                action=help_text.HelpAll,
                nargs=0,
                default=argparse.SUPPRESS,
                help="show every option and exit",
            )

    def format_help(self) -> str:
        """Return the text of --help."""
        return (
            help_text.format_short_page(self, self._usage_line(), self._first)
            if self._first
            else self.format_all()
        )

    def format_all(self) -> str:
        """Return the help of every option."""
        self.usage = self._usage_line().replace("%", "%%")
        return super().format_help()

    def _usage_line(self) -> str:
        return f"{self.prog} {self._usage}" if self._usage else help_text.format_usage(self)

    def add_common(self, workers: str = "", overwrite: bool = True) -> None:
        """Add the options that most commands share.

        workers: what worker processes do, such as "read files", for the help of --num-workers; ""
        if there are none. overwrite: add --overwrite, for a command that makes an artifact.
        """
        common = self.add_argument_group("common")
        add_config(common, "print the plan and change nothing")
        if overwrite:
            common.add_argument(
                "--overwrite",
                action="store_true",
                help="replace an existing artifact made from other inputs or options",
            )
        if workers:
            common.add_argument(
                "--num-workers",
                type=positive_int,
                default=os.cpu_count() or 1,
                metavar="N",
                help=f"processes that {workers} (default: one per core)",
            )
        common.add_argument("--no-progress", action="store_true", help="show no progress")

    def parse(self, argv: Sequence[str]) -> Options:
        """Parse a command line. Raises UsageError if an option is unknown or has a wrong value."""
        return self._parse_known(self.expand_config(argv))

    def expand_config(self, argv: Sequence[str]) -> list[str]:
        """Return the command line with the options of --config before it. Raises UsageError."""
        TYPED_AS.clear()
        argv = [self.to_our_name(arg) for arg in argv]
        if not (file := self._value_of(argv, "--config")):
            return argv
        config = Path(file)
        typed = {self._dest(arg.partition("=")[0]) for arg in argv if arg.startswith("-")}
        experiment = self._value_of(argv, "-e", "--experiment-name") or ""
        if len(Path(experiment).parts) > 1:  # a path sets --save-dir
            typed.add("save_dir")
        from_yaml: list[str] = []
        named: dict[str, tuple[str, list[str]]] = {}  # option → key and words
        problems = Problems()
        has_unknown = False
        ours = {flag.lstrip("-").replace("-", "_") for flag in self._option_string_actions}
        for key, value in config_file.read_file_options(config, VOLATILE, ours).items():
            names: dict[str, str] = {}
            flag = self.to_our_name(f"--{key}", names)
            if names and value is not None and self._dest(flag) not in typed:
                TYPED_AS[str(key)] = flag
            if flag not in self._option_string_actions or flag in _HELP:
                near, hint = unknown_options.suggest_option(flag, self._option_string_actions)
                name = re.split(r"[\s=:]", str(key))[0]  # a secret may follow it
                has_unknown = True
                problems.add(f"{config}: unknown key {name!r}{near}", hint=hint)
            elif self._is_only_typed(flag) and value:
                problems.add(
                    f"{config}: only the command line may set {flag}",
                    expected="a file without it",
                )
            elif flag == "--config" or self._dest(flag) not in typed:
                action = self._option_string_actions[flag]
                words = config_file.as_arguments(
                    action, flag, value, f"{config}: {key!r}", JOINED.get(action.type, "")
                )
                if value is None:
                    continue
                first, before = named.setdefault(self._dest(flag), (key, words))
                if config_file.parse_values(action, before) != config_file.parse_values(
                    action, words
                ):
                    problems.add(
                        f"{config}: {first!r} and {key!r} are the same option and have "
                        "different values",
                        expected="one of them",
                    )
                from_yaml += words
        problems.raise_if_any(hint=unknown_options.OTHER_TRAINERS if has_unknown else "")
        needed = [action for action in self._actions if action.required]
        try:  # without required options, so that an error here concerns the file
            for action in needed:
                action.required = False
            self._parse_known(from_yaml)
        except UsageError as error:
            raise UsageError(f"{config}: {error.problem}") from None
        finally:
            for action in needed:
                action.required = True
        return from_yaml + argv

    def parse_known_args(self, *arguments: Any, **named: Any) -> Any:
        """Return options and unknown words. Raises one UsageError for all wrong values."""
        self._bad = []
        result = super().parse_known_args(*arguments, **named)
        if self._bad:
            self.error(self._bad.pop())
        return result

    def error(self, message: str) -> NoReturn:
        """Raise UsageError instead of exiting, so that a stage reports all errors alike."""
        raise self._with_help(
            combine_errors(
                [
                    UsageError(re.sub(r"^argument ([^:]+):", r"\1:", text))
                    for text in (*self._bad, message)
                ]
            )
        )

    def _with_help(self, error: StageError) -> StageError:
        """Return an error with the command that shows all options."""
        shown = "--help-all" if "--help-all" in self._option_string_actions else "--help"
        error.run = commands.help_of(shown, self.prog.partition(" ")[2])
        return error

    def _get_value(self, action: argparse.Action, text: str) -> Any:
        try:
            if action.type is Path and not text:  # an unset variable; Path("") is the directory "."
                raise argparse.ArgumentError(action, "expected a path, got ''")
            return super()._get_value(action, text)
        except argparse.ArgumentError as error:
            self._bad.append(str(error))
            return [] if isinstance(action, argparse._ExtendAction) else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            if value is not None:  # None stands for a refused value
                super()._check_value(action, value)
        except argparse.ArgumentError as error:
            self._bad.append(str(error))

    def _parse_known(self, argv: list[str]) -> Options:
        options, unknown_words = self.parse_known_args(argv)
        if unknown_words:
            raise self._with_help(
                unknown_options.unknown_options_error(unknown_words, self._option_string_actions)
            )
        self._require_names(options)
        return options

    def _require_names(self, options: Options) -> None:
        """Raise UsageError for paths that are not valid UTF-8, which some libraries cannot open."""
        problems = Problems()
        try:
            if _NOT_UTF8.search(current := str(Path.cwd())):
                problems.add(
                    f"the current directory {current} is not valid UTF-8", expected=_NAME_IN_UTF8
                )
        except FileNotFoundError:
            problems.add(
                "the current directory was deleted",
                expected="a directory that is there: `cd` into one",
            )
        for action in self._actions:
            value = getattr(options, action.dest, None)
            for word in value if isinstance(value, list) else [value]:
                if action.dest not in _ANY_BYTES and _NOT_UTF8.search(str(word)):
                    problems.add(
                        f"{'/'.join(action.option_strings)}: {word} is not valid UTF-8",
                        expected=_NAME_IN_UTF8,
                    )
        problems.raise_if_any()

    def to_our_name(self, argument: str, typed_as: dict[str, str] = TYPED_AS) -> str:
        """Turn `--src_dir=a_b` into `--src-dir=a_b`, and aliases into our names.

        typed_as: receives each alias that was replaced, with our name.
        """
        if not argument.startswith("--"):
            return argument
        name, equals, value = argument.partition("=")
        flag = name.replace("_", "-")
        action = self._option_string_actions.get(flag)
        if action and flag not in action.option_strings:
            flag = next(text for text in action.option_strings if text.startswith("--"))
            typed_as[name] = flag
        return flag + equals + value

    def _dest(self, flag: str) -> str:
        action = self._option_string_actions.get(flag)
        return action.dest if action else flag

    def _is_only_typed(self, flag: str) -> bool:
        action = self._option_string_actions[flag]
        return action.dest in config_file.TYPED or getattr(action, "only_typed", False)

    def _value_of(self, argv: Sequence[str], *flags: str) -> str | None:
        """Return the value of an option before the command line is parsed."""
        finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        finder.add_argument(*flags, dest="value")
        try:
            return finder.parse_known_args(argv)[0].value
        except argparse.ArgumentError:
            return None


def add_aliases(
    parser: argparse._ActionsContainer, action: argparse.Action, flags: Iterable[str]
) -> None:
    """Let a parser or group accept more flags for an option, which --help does not show.

    Raises ValueError for a flag of another option.
    """
    for flag in flags:
        if parser._option_string_actions.setdefault(flag, action) is not action:
            raise ValueError(f"{flag} is declared twice")


def add_config(parser: argparse._ActionsContainer, dry_run: str) -> None:
    """Add --config and --dry-run to a parser or group. dry_run: help text of --dry-run."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML file with options (`key: value`); the command line wins (default: none)",
    )
    parser.add_argument("--dry-run", action="store_true", help=dry_run)


def to_plain_values(options: Any) -> dict[str, Any]:
    """Return the options as values to store: paths as strings, secrets redacted.

    options: a namespace of argparse, or an object of a declared class.
    """

    def plain(key: str, value: Any) -> Any:
        if value is not None and is_secret(key):
            return REDACTED
        if isinstance(value, list):
            return [str(item) if isinstance(item, Path) else item for item in value]
        return str(value) if isinstance(value, Path) else value

    return {key: plain(key, value) for key, value in vars(options).items()}


def identity(options: Any, *leave_out: str) -> dict[str, Any]:
    """Return the options that decide what an artifact contains."""
    skip = VOLATILE | set(leave_out)
    return {key: value for key, value in to_plain_values(options).items() if key not in skip}


def _number(
    convert: Callable[[str], Any], accept: Callable[[Any], bool], expected: str
) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except ValueError:
            value = None
        if value is None or not accept(value):
            shown = repr(text) if text else "nothing"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {shown}")
        return value

    return parse


_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8": "fp8"}
_FINITE = float("inf")
positive_int = _number(int, lambda n: n > 0, "a whole number above 0")
count = _number(int, lambda n: n >= 0, "a whole number, 0 or more")
positive = _number(float, lambda x: 0 < x < _FINITE, "a number above 0")
non_negative = _number(float, lambda x: 0 <= x < _FINITE, "a number, 0 or more")
factor = _number(float, lambda x: x == 0 or 1 < x < _FINITE, "0, or a number above 1")
fraction = _number(float, lambda x: 0 <= x <= 1, "a fraction from 0 to 1")
port = _number(int, lambda n: 0 < n < 1 << 16, "a port from 1 to 65535")
percent = _number(float, lambda x: 0 <= x < 100, "a percentage from 0 to below 100")
seed = _number(int, lambda n: 0 <= n < 1 << 63, "a whole number from 0 to 2^63 - 1")


def parse_variables(text: str) -> str:
    """Parse a JSON object, and return it as JSON, with sorted keys; "" stays."""
    if not text.strip():
        return ""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("expected a JSON object such as '{\"key\": true}'")
    if taken := sorted(RESERVED_KWARGS & value.keys()):
        raise argparse.ArgumentTypeError(f"the conversations themselves set {', '.join(taken)}")
    return json.dumps(value, sort_keys=True)


def parse_counts(text: str) -> list[int]:
    """Parse `8,64,512`, whole numbers above 0."""
    return [positive_int(part) for part in text.split(",")]


def parse_names(text: str) -> list[str]:
    """Return the names in a value such as `text,meta.title`."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"expected names separated by commas, got {text!r}")
    return names


def dtype(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts any usual name of a dtype and returns one of `names`."""
    canonical = {_DTYPES.get(name, name): name for name in names}

    def parse(text: str) -> str:
        name = text.lower()
        return canonical.get(_DTYPES.get(name, name), text)

    return parse


def on_off(text: str) -> bool:
    """Parse `on` or `off`."""
    try:
        return {"on": True, "true": True, "1": True, "off": False, "false": False, "0": False}[
            text.lower()
        ]
    except KeyError:
        raise argparse.ArgumentTypeError(f"expected on or off, got {text!r}") from None


def auto_on_off(text: str) -> bool | None:
    """Parse `on`, `off` or `auto`, which becomes None."""
    try:
        return None if text.lower() == "auto" else on_off(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected auto, on or off, got {text!r}") from None


def or_switch(
    on: str | None, off: str, parse: Callable[[str], str] = str
) -> Callable[[str], str | None]:
    """Return a parser that also accepts the words for on and off that other trainers use.

    on, off: the values that these words stand for. parse: the parser of all other words.
    """
    words = {
        **dict.fromkeys(("on", "true", "yes", "1"), on),
        **dict.fromkeys(("off", "false", "no", "0"), off),
    }

    def read(text: str) -> str | None:
        return words[text.lower()] if text.lower() in words else parse(text)

    return read


def span(text: str) -> tuple[int, int]:
    """Parse `START:END`, two whole numbers with 1 ≤ START ≤ END."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise argparse.ArgumentTypeError(f"expected START:END, numbers from 1, got {text!r}")
    return int(first), int(last)


def positive_size(text: str) -> int:
    """Parse a size such as `5GB`, above 0."""
    from lib.core import units

    try:
        size = units.parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if size <= 0:
        raise argparse.ArgumentTypeError(f"expected a size above 0, got {text!r}")
    return size


# The separator with which a list is typed as one word, by the parser of the option.
JOINED: dict[Any, str] = {parse_counts: ",", span: ":"}
