"""Find the process of this machine that prepares or trains a run.

Before it trains, a run has no files that name its process. So its directory comes from the few
options that name it, on the command line of the process and in the file of its --config.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from lib.core import liveness, options, paths, records
from lib.core.commands import TRAINER
from lib.core.errors import StageError
from lib.core.options import Options, Parser

_LAUNCHER = "supervise.py"


class RunProcess(NamedTuple):
    """A process of this machine that prepares or trains a run."""

    pid: int
    parent: int
    is_launcher: bool


def find_process(root: Path) -> RunProcess | None:
    """Return the process of this machine that prepares or trains the run in `root`, if any.

    If several processes belong to the run, the one that started the others is returned: the
    launcher, if there is one.
    """
    processes: dict[int, RunProcess] = {}
    for process in liveness.list_processes():
        entry = Path("/proc") / str(process.pid)
        with suppress(OSError, StageError, ValueError):
            words = (entry / "cmdline").read_text(encoding="utf-8").split("\0")[:-1]
            names = [Path(word).name for word in words]
            directory = find_directory(
                (entry / "cwd").readlink(), words[names.index(TRAINER) + 1 :]
            )
            if names[0].startswith("python") and directory == root:
                is_launcher = names[1] == _LAUNCHER
                processes[process.pid] = RunProcess(process.pid, process.parent, is_launcher)
    roots = [process for process in processes.values() if process.parent not in processes]
    return max(roots, key=lambda process: process.is_launcher, default=None)


def find_directory(cwd: Path, words: Sequence[str]) -> Path | None:
    """Return the directory of the run that stage 04 trains with these options; None for a bench.

    cwd: the directory in which they were typed. Raises OSError, ValueError or UsageError if the
    options name no run.
    """
    parser = options.Parser(None)
    parser.add_argument("-e", "--experiment-name")
    save_dir = parser.add_argument("--save-dir", type=Path)
    options.add_aliases(parser, save_dir, ["--checkpoint-dir", "--output-dir"])
    parser.add_argument("--bench", nargs="?", const="true")
    parser.add_argument("--config")
    opts = _parse_known(parser, words)
    if opts.config:
        from_file = list(_read_words(parser, cwd / opts.config, opts))
        opts = _parse_known(parser, [*from_file, *words])
    paths.expand_save_dir(opts)
    if opts.bench or not opts.experiment_name:
        return None
    directory: Path = cwd / opts.save_dir / opts.experiment_name
    return directory.resolve()


def _parse_known(parser: Parser, words: Sequence[str]) -> Options:
    """Return the options that name the run; all other words are ignored."""
    return parser.parse_known_args([parser.to_our_name(word, {}) for word in words])[0]


def _read_words(parser: Parser, file: Path, typed: Options) -> Iterator[str]:
    """Yield the options in a file of --config, as words; the directory of a typed path wins."""
    content = records.read_yaml(file, numbers_as_text=True)
    recorded = content.get("options")
    values = recorded if isinstance(recorded, dict) and "versions" in content else content
    has_directory = len(Path(typed.experiment_name or "").parts) > 1
    for key, value in values.items():
        flag = parser.to_our_name(f"--{key}", {})
        is_known = flag[2:].replace("-", "_") in vars(typed)
        if is_known and value not in (None, False) and not (has_directory and flag == "--save-dir"):
            yield f"{flag}={value}"
