"""Runs what is measured in processes of their own, and several ways to do the same in turns."""

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


def torchrun(ranks: int) -> list[str]:
    """Return what starts a script on so many ranks of this machine."""
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={ranks}",
    ]


def command(script: str, ranks: int = 0, **options: object) -> list[str]:
    """Return what starts a script of this folder: on ranks, or in one process without torchrun."""
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    return [
        *(torchrun(ranks) if ranks else [sys.executable]),
        str(Path(__file__).with_name(script)),
        *words,
    ]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Return what a command prints; exits where it fails."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **(environment or {})}
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


def figures(command: Sequence[str]) -> dict[str, Any]:
    """Return what a command hands to `end`, empty when that is nothing."""
    found = [line for line in run(command).splitlines() if line.startswith(_MARK)]
    return json.loads(found[-1].removeprefix(_MARK)) if found else {}


def end(figures: dict[str, Any] | None = None) -> NoReturn:
    """End this process at once, and print what its caller reads by `figures`."""
    if figures is not None:
        print(_MARK + json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)


def in_turns(ways: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Return what each way returns in each round; every round begins with another way."""
    found: dict[str, list[Result]] = {name: [] for name in ways}
    names = list(ways)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(ways[name]())
    return found
