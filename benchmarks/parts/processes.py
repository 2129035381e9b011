"""Run measurements in child processes, and several methods in turn."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

ROOT = Path(__file__).resolve().parents[2]
_MARK = "RESULT "
Result = TypeVar("Result")


def torchrun_command(ranks: int) -> list[str]:
    """Return the command prefix that starts a script on N ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]


def script_command(script: str, ranks: int = 0, **options: object) -> list[str]:
    """Return the command of a script in this directory. ranks: 0 for a process without torchrun."""
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [
        *(torchrun_command(ranks) if ranks else [sys.executable]),
        str(Path(__file__).with_name(script)),
        *words,
    ]


def run_command(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return the output of a command; exits if it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def run_and_read_figures(command: Sequence[str]) -> dict[str, Any]:
    """Run a command; return the figures that it passes to `end_process`, {} if none."""
    lines = [line for line in run_command(command).splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1].removeprefix(_MARK)) if lines else {}


def end_process(figures: dict[str, Any] | None = None) -> NoReturn:
    """Print figures for `run_and_read_figures`, and end this process at once."""
    if figures is not None:
        print(_MARK + json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)


def run_in_turns(ways: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Run all methods in each round, in rotating order; return the results by method."""
    results: dict[str, list[Result]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            results[name].append(ways[name]())
    return results
