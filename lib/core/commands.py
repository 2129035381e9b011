"""Make the commands that messages show in `run:` and `next:` lines, ready to be pasted.

A printed command must work when it is pasted. So it names a script relative to the current
directory, uses the interpreter (or torchrun, or the launcher) that the person used, and quotes each
word for the shell. Advice in words is not a command: it belongs under `hint:`.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lib.core import launcher
from lib.core.errors import TYPED_AS

ROOT = Path(__file__).resolve().parents[2]
# Set by a launcher for the processes that it starts: the command that was typed.
LAUNCHED_AS = "LAUNCHED_AS"
_LAUNCHER = "launch/single_node.sh"
TRAINER = "04_train_fsdp.py"
_BATCH_SCRIPT = "slurm.sbatch"
# The command of --on-end may contain any secret.
_SECRET = re.compile(r"token$|password|secret|api_key|^on_end$")
# Names and paths of secrets are public, and so are special tokens and the tokens by which AWS
# recognises a request that it has already served.
_PUBLIC = re.compile(
    r"^(?:token_secret|image_pull_secret|creation_token|client_request_token)$|"
    r"_(?:name|file|path|dir|stdin)$|"
    r"(?:^|_)(?:additional_special|bos|cls|eos|mask|pad|sep|unk)_token$"
)
_VARIABLE = re.compile(r"((?:--[\w-]+=)?([A-Za-z_]\w*)=)(.+)", re.DOTALL)
_WEIGHT = re.compile(r"[\d./]+")  # of a dataset
_USER_INFO = re.compile(r"(?<=://)[^/\s]+@")
# Control characters, and bytes of a path that are not UTF-8.
_UNTYPABLE = re.compile(r"([\x00-\x1f\x7f-\x9f\udc80-\udcff])")
REDACTED = "[redacted]"
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# The function that a person called from Python, with its positional and named arguments.
_call: ContextVar[tuple[str, Sequence[Any], dict[str, Any]] | None] = ContextVar(
    "_call", default=None
)


def as_typed(*more: object, drop: Sequence[str] = ()) -> str:
    """Return the command that was typed, with more words at its end.

    drop: options to leave out with their values, under all their names. If an option is given twice
    the last one counts, so only flags and options that collect values need to be dropped. While a
    `repeatable_call` runs, it is the call with more arguments.
    """
    if called := _call.get():
        return _format_call(*called, _words(more))
    return _join_words([*_drop_options(typed_words(), drop), *_words(more)])


def replace_value(option: Sequence[str], old: object, new: object, drop: Sequence[str] = ()) -> str:
    """Return the command that was typed, with `new` instead of the value `old` of an option.

    option: its short and its long form; its aliases count as well. A value `old=WEIGHT` keeps its
    weight. An argument `old` without any option is replaced too. drop: see `as_typed`.
    """
    names = _names_of(option)
    value = re.compile(rf"(?P<flag>-\w=?|--[\w.-]+=)?{re.escape(str(old))}(?P<rest>=.*)?")
    words = []
    before = ""
    for word in _drop_options(typed_words(), drop):
        match = value.fullmatch(word)
        flag = (match["flag"] or before).rstrip("=") if match else ""
        if match and (_spell_flag(flag) in names or not flag.startswith("-")):
            words.append(f"{match['flag'] or ''}{new}{match['rest'] or ''}")
        else:
            words.append(word)
        before = word
    return _join_words(words)


def with_options(*words: object) -> str:
    """Return the command that was typed, with `words` instead of all its options."""
    typed = typed_words()
    ends = [i for i, word in enumerate(typed) if word in ("--", sys.argv[0])] or [
        i for i, word in enumerate(typed) if Path(word).name == _BATCH_SCRIPT
    ]
    end = ends[0] + 1 if ends else len(_program())
    return _join_words([*typed[:end], *_words(words)])


def script(name: str, *words: object) -> str:
    """Return the command that runs a script of this project, such as `05_export_checkpoint.py`."""
    return _join_words([_python(), path_of(name), *_words(words)])


def python(*words: object) -> str:
    """Return a command for the current interpreter."""
    return _join_words([_python(), *_words(words)])


def module(name: str, *words: object) -> str:
    """Return the command that runs a module of this project, such as `lib.generate`."""
    place = "" if Path.cwd() == ROOT else _join_words([f"PYTHONPATH={ROOT}"]) + " "
    return place + python("-m", name, *words)


def train(*words: object) -> str:
    """Return a command of stage 04, through the launcher if the machine has several GPUs."""
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) > 1 and (start := _launcher()):
        return _join_words([*start, "--", *_words(words)])
    return _join_words([*_torchrun(), path_of(TRAINER), *_words(words)])


def pip_install(*words: object) -> str:
    """Return the command that installs packages for this interpreter.

    In an unpacked bundle it installs from the wheelhouse.
    """
    local = (
        ["--no-index", "--find-links", path_of("wheelhouse")]
        if (ROOT / "wheelhouse").is_dir()
        else []
    )
    return _join_words([_python(), "-m", "pip", "install", *local, *_words(words)])


def pip_install_optional(*names: str) -> str:
    """Return the command that installs packages of requirements-optional.txt."""
    lines = (ROOT / "requirements-optional.txt").read_text(encoding="utf-8").splitlines()
    pins = {re.split(r"[\[=]", line)[0]: line for line in lines}  # `name[extra]==version`
    return pip_install(*(pins[name] for name in names))


def shell(*words: object) -> str:
    """Return the command line of another program, quoted for the shell."""
    return _join_words(_words(words))


def help_of(flag: str = "--help", action: str = "") -> str:
    """Return the command that lists the options of the running script, or of its subcommand.

    action: the subcommand; empty for the script itself.
    """
    return _join_words([*_program(), *action.split(), flag])


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as words of a command line, without empty values.

    True becomes a flag. An option with a list is repeated for each value.
    """
    words: list[str] = []
    for key, value in options.items():
        flag = f"--{key.replace('_', '-')}"
        if value is True:
            words.append(flag)
        elif value:
            values = value if isinstance(value, list) else [value]
            words += [word for item in values for word in (flag, str(item))]
    return words


def delete_and_rerun(directory: Path) -> str:
    """Return the commands that delete a derived directory and run the typed command again."""
    return f"{shell('rm', '-r', directory)}\n{as_typed()}"


def move_away(directory: Path, then: str) -> str:
    """Return the commands that rename a directory that is in the way, and then run `then`."""
    return f"{shell('mv', directory, f'{directory}.aside')}\n{then}".strip()


def repeatable_call(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Let `as_typed` return the call of a function, instead of a command, while it runs."""

    @functools.wraps(function)
    def call(*positional: Parameters.args, **named: Parameters.kwargs) -> Result:
        outer = _call.set((function.__name__, positional, named))
        try:
            return function(*positional, **named)
        finally:
            _call.reset(outer)

    return call


def _format_call(
    name: str, positional: Sequence[Any], named: Mapping[str, Any], more: Sequence[str]
) -> str:
    """Return a call as Python code. more: options, each with its value or, for flags, without."""
    arguments = {**named}
    flag = ""
    for word in more:
        if word.startswith("--"):
            flag = word[2:].replace("-", "_")
        arguments[flag] = True if word.startswith("--") else word
    shown = [
        f"{key}=os.environ['HF_TOKEN']" if value and is_secret(key) else f"{key}={value!r}"
        for key, value in arguments.items()
    ]
    return f"{name}({', '.join([*map(repr, positional), *shown])})"


def typed_words() -> list[str]:
    """Return the command that starts this process again, as a list of words.

    Under a launcher, it is the command of the launcher as it was typed. Under plain torchrun it is
    a command that starts the same ranks.
    """
    if launched := os.environ.get(LAUNCHED_AS):
        return shlex.split(launched)
    if launcher.is_torchrun():
        return _ranks_command(os.environ)
    return [*_program(), *sys.argv[1:]]


def is_secret(name: str) -> bool:
    """Return whether the name of an option or field shows that its value is secret."""
    name = name.lstrip("-").replace("-", "_").lower()
    return bool(_SECRET.search(name)) and not _PUBLIC.search(name)


def redact_argv(argv: Sequence[str], instead: str = REDACTED) -> list[str]:
    """Return a command line with `instead` in place of its secrets.

    Secrets are the values of secret options and variables, and the user info of URLs.
    """
    shown: list[str] = []
    before = ""
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if before.startswith("--") and "=" not in before and is_secret(before):
            shown.append(instead)
        elif equals and name.startswith("--") and is_secret(name):
            shown.append(f"{name}={instead}")
        else:
            redacted = _redact_variable(argument, instead)
            shown.append(_USER_INFO.sub(f"{instead}@", redacted))
        before = argument
    return shown


def _redact_variable(word: str, instead: str) -> str:
    """Return `NAME=value`, or `--option NAME=value`, with a secret value replaced."""
    match = _VARIABLE.fullmatch(word)
    if not match or not is_secret(match[2]):
        return word
    is_dataset = not match[2].isupper() and _WEIGHT.fullmatch(match[3])
    return word if is_dataset else match[1] + instead


def _words(words: Sequence[object]) -> list[str]:
    """Return words as text, with `./` before a path that would look like an option."""
    return [
        f"./{word}" if isinstance(word, Path) and str(word).startswith("-") else str(word)
        for word in words
    ]


def _join_words(words: Sequence[str]) -> str:
    """Return words quoted for the shell, with variables in place of secrets."""
    redacted = redact_argv(words, REDACTED)
    return " ".join(map(_quote_word, redacted, ["", *redacted]))


def _quote_word(word: str, before: str) -> str:
    """Return a word for the shell, with a variable in place of a secret."""
    is_command = (before if word == REDACTED else word).lstrip("-")[:6] in ("on-end", "on_end")
    variable = '"$ON_END"' if is_command else '"$HF_TOKEN"'
    if word == REDACTED:
        return variable
    if not word.endswith(f"={REDACTED}"):
        return _quote_bytes(word) if _UNTYPABLE.search(word) else shlex.quote(word)
    before = word.removesuffix(REDACTED)
    name = before[:-1].rpartition("=")[2]
    return before + (f'"${name}"' if name.isidentifier() and name.isupper() else variable)


def _quote_bytes(word: str) -> str:
    """Return a word for the shell with control characters and bytes outside of UTF-8 escaped."""
    escaped = (
        "".join(f"\\x{byte:02x}" for byte in part.encode("utf-8", "surrogateescape"))
        if _UNTYPABLE.fullmatch(part)
        else re.sub(r"([\\'])", r"\\\1", part)
        for part in _UNTYPABLE.split(word)
    )
    return f"$'{''.join(escaped)}'"


def _drop_options(words: Sequence[str], drop: Sequence[str]) -> Iterator[str]:
    """Yield the words without some options and the values that follow them."""
    dropping = False
    names = _names_of(drop)
    for word in words:
        if word.startswith("-"):
            dropping = _spell_flag(word.partition("=")[0]) in names
        if not dropping:
            yield word


def _names_of(options: Sequence[str]) -> set[str]:
    """Return options with the aliases that were typed for them."""
    return {*options, *(_spell_flag(name) for name, ours in TYPED_AS.items() if ours in options)}


def _spell_flag(flag: str) -> str:
    """Return `--src-dir` for `--src_dir`; a short option stays."""
    return flag.replace("_", "-")


def _program() -> list[str]:
    """Return the interpreter and the script or module that runs."""
    is_module = sys.argv[0].startswith("lib.")  # as lib/checkpoints/__main__.py calls itself
    return [_python(), *(["-m"] if is_module else []), sys.argv[0]]


def _python() -> str:
    """Return the interpreter: `python` if the shell finds the current one by that name."""
    return "python" if _is_found("python") else sys.orig_argv[0]


def _torchrun() -> list[str]:
    return ["torchrun"] if _is_found("torchrun") else [_python(), "-m", "torch.distributed.run"]


def _ranks_command(torchrun: Mapping[str, str]) -> list[str]:
    """Return the command that starts the ranks of this launch, from the variables of torchrun."""
    nodes = torchrun.get("GROUP_WORLD_SIZE", "1")
    ranks = torchrun.get("LOCAL_WORLD_SIZE", "1")
    per_node = ["--nproc-per-node", ranks] if ranks != "1" else []
    if nodes != "1":
        rendezvous = {
            "--nnodes": nodes,
            "--node-rank": torchrun["GROUP_RANK"],
            "--master-addr": torchrun["MASTER_ADDR"],
            "--master-port": torchrun["MASTER_PORT"],
        }
        per_node = [word for option in rendezvous.items() for word in option] + per_node
    return [*_torchrun(), *per_node, *sys.argv]


def _launcher() -> list[str]:
    """Return the words that start the launcher with this interpreter; empty without it."""
    if not (ROOT / _LAUNCHER).is_file():
        return []
    usual = ROOT / ".venv" / "bin" / "python"
    chosen = os.environ.get("PYTHON") or (
        str(usual)
        if usual.exists() and "VIRTUAL_ENV" not in os.environ
        else shutil.which("python3") or ""
    )
    is_same = Path(chosen).absolute().parent == Path(sys.executable).parent
    return [*(["env", f"PYTHON={sys.executable}"] if not is_same else []), path_of(_LAUNCHER)]


def _is_found(program: str) -> bool:
    """Return whether the shell finds a program in the directory of the current interpreter."""
    path = shutil.which(program)
    return path is not None and Path(path).absolute().parent == Path(sys.executable).parent


def path_of(name: str) -> str:
    """Return the path of a script of this project, relative if possible in the current directory.

    Outside of the project it is relative if the path that was typed is.
    """
    near = os.path.relpath(ROOT)
    if not near.startswith(os.pardir):
        return str(Path(near) / name)
    for typed in (*shlex.split(os.environ.get(LAUNCHED_AS, ""))[:1], sys.argv[0]):
        beside = Path(typed).parent
        for directory in (beside, Path(os.path.normpath(beside / os.pardir))):
            if directory.resolve() == ROOT:
                return str(directory / name)
    return str(ROOT / name)
