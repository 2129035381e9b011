#!/usr/bin/env python3
"""Show runs from their files: all runs at a glance, or one run in detail.

  python launch/monitor.py                        list the runs in outputs/
  python launch/monitor.py outputs/exp            update until the run is complete or Ctrl-C
  python launch/monitor.py outputs/exp --once     print the run once, for example for a mail
  python launch/monitor.py outputs/exp --log      follow the log of rank 0 from its last lines

The page of a run shows progress, loss curve, speed, memory, checkpoints and warnings. While the
run is active, it also shows the GPUs of this machine, if nvidia-smi is installed. For a directory
of runs, the command lists the runs. It reads state.json, metrics.jsonl, events.jsonl, config.yaml,
logs/ and lock.json, on any machine that sees them, and changes nothing. The exit code is 2 for bad
options, and with --once, --log or --json if there is no such run, otherwise 0.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console, Group
from rich.live import Live

from launch.runs import table
from launch.runs.page import render_page
from lib.core import commands, options, paths, stage
from lib.core.errors import UsageError, one_line
from lib.core.options import Options
from lib.runs import run_list
from lib.runs.growing_files import GrowingFile
from lib.runs.run_files import RunFiles, require_run

_LOG_LINES = 40
_LOG_BYTES = 64 << 10
_TABLE_WIDTH = 120  # columns if the output is no terminal
_UNWRAPPED = 10_000  # columns in which no line of a page is wrapped


def parse(argv: list[str]) -> Options:
    """Parse the command line. Raises UsageError for options that exclude each other."""
    parser = options.Parser(__doc__)
    parser.add_argument(
        "experiment",
        nargs="?",
        metavar="NAME|DIR",
        help="name of the run, for outputs/NAME, or its directory, or a directory of runs "
        "(default: outputs)",
    )
    parser.add_argument("--once", action="store_true", help="show the run once and exit")
    parser.add_argument(
        "--log",
        action="store_true",
        help="follow the log of rank 0 until the run is complete or Ctrl-C",
    )
    parser.add_argument(
        "--every", type=options.positive, default=2.0, metavar="S", help="seconds between updates"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the values as JSON, once, instead of a page"
    )
    opts = parser.parse(argv)
    if opts.log and not opts.experiment:
        raise UsageError("--log follows the log of one run", expected="the name of a run")
    return opts


def main(argv: list[str]) -> None:
    """List runs, or show one run: once, live, or as its log."""
    opts = parse(argv)
    directory = _find_directory_of_runs(opts.experiment)
    if directory is not None:
        _print_list(directory, opts.json)
        return
    console = make_console(_UNWRAPPED)
    # A pipe that gets colours by FORCE_COLOR is no terminal, and a dumb terminal moves no cursor.
    is_live = sys.stdout.isatty() and console.is_interactive
    is_live = is_live and not (opts.once or opts.log or opts.json)
    experiment = paths.existing_experiment(opts.experiment)
    if not is_live:
        require_run(experiment)
    run = RunFiles(experiment.root.resolve())
    if opts.json:
        _print_json(
            run_list.summarise_run(experiment.root.resolve(), experiment.root.name).to_json()
        )
        return
    if opts.log:
        _follow_log(run, max(0.2, opts.every))
        return
    if is_live:
        _show_live(run, console, max(0.2, opts.every))
    run.update()
    print(format_text(console, render_page(run, console.width)))


def make_console(width: int) -> Console:
    """Return a console for standard output. width: columns if it is no terminal.

    Texts are shown as they are: `[red]` and `:smile:` in the name of a run mean nothing.
    """
    columns = None if sys.stdout.isatty() else width
    return Console(width=columns, markup=False, emoji=False, highlight=False)


def format_text(console: Console, parts: Group) -> str:
    """Return the lines that a console would print, without the blanks at their ends."""
    with console.capture() as capture:
        console.print(parts)
    return "\n".join(line.rstrip(" ") for line in capture.get().rstrip("\n").split("\n"))


def _find_directory_of_runs(text: str | None) -> Path | None:
    """Return the directory whose runs are listed; None if the text names one run."""
    if text is None:
        return paths.OUTPUTS
    root = paths.existing_experiment(text).root
    if not root.is_dir() or run_list.is_run(root):
        return None
    return root if run_list.find_runs(root)[0] else None


def _print_list(directory: Path, as_json: bool) -> None:
    """Print the table of the runs below a directory."""
    runs, skipped = run_list.list_runs(directory) if directory.is_dir() else ([], [])
    if as_json:
        _print_json({"runs": [run.to_json() for run in runs], "skipped": skipped})
        return
    if runs or skipped:
        console = make_console(shutil.get_terminal_size((_TABLE_WIDTH, 40)).columns)
        print(format_text(console, table.render_table(runs, skipped)))
    if not runs:
        print(f"no runs in {directory}/; next: {commands.script('04_train_fsdp.py', '--help')}")


def _print_json(values: object) -> None:
    print(json.dumps(_replace_non_finite(values), indent=1, default=str))


def _replace_non_finite(value: Any) -> Any:
    """Return a value with null for NaN and infinity, which a config.yaml may hold but not JSON."""
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _show_live(run: RunFiles, console: Console, every: float) -> None:
    """Redraw the page until the run is complete, and then restore the terminal."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    # Redirected, standard output would have no encoding, and the page only ASCII.
    live = Live(
        console=console,
        screen=True,
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with suppress(KeyboardInterrupt), live:
        while not run.is_complete():
            run.update()
            live.update(render_page(run, console.width), refresh=True)
            time.sleep(every)


def _follow_log(run: RunFiles, every: float) -> None:
    """Print the last lines of rank 0's log and all new ones until the run is complete."""
    signal.signal(signal.SIGTERM, _raise_interrupt)
    log = GrowingFile(run.experiment.rank_log(0), _LOG_BYTES)
    try:
        lines = log.read_new()[0][-_LOG_LINES:]
        if not lines:
            print(f"no log in {run.experiment.root} yet", flush=True)
        is_last = False
        while True:
            for line in lines:
                print(one_line(line.decode("utf-8", "replace")), flush=True)
            if is_last:
                return
            run.update()
            is_last = run.is_complete()  # the summary is logged after state.json is written
            time.sleep(every)
            lines = log.read_new()[0]
    except KeyboardInterrupt:
        pass


def _raise_interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    stage.run_main(main, only_shows=True)
