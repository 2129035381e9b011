"""What checkpoints an experiment has.

  python -m lib.checkpoints list outputs/exp        sizes and figures; COMMIT, manifest and sizes
  python -m lib.checkpoints verify outputs/exp      … and every byte against its digest

Exits with 3 when one is damaged. Nothing is changed or moved: stage 04 does that when it resumes.
"""

from __future__ import annotations

import sys
import time

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import log, options, paths, stage, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.progress import Progress

_COLUMNS = ("step", "saved", "size", "tokens", "loss", "validation", "state")


def main(argv: list[str]) -> None:
    """Print the table; ArtifactError when a checkpoint is damaged."""
    parser = options.Parser(__doc__)
    parser.add_argument("action", choices=("list", "verify"), help="what to do")
    parser.add_argument("experiment", metavar="NAME|DIR",
                        help="the run: its name, for outputs/NAME, or its directory, or the "
                             "checkpoints directory in it")
    opts = parser.parse(argv)
    run = paths.existing_experiment(opts.experiment)
    directory = run.checkpoints if run.checkpoints.is_dir() else run.root
    found = commit.scan(directory)
    aside = commit.quarantined(directory)
    if not found and not aside:
        raise UsageError(f"no checkpoints in {directory}",
                         expected="outputs/<exp> of a run that has saved")
    rows = [_row(checkpoint, opts.action == "verify") for checkpoint in reversed(found)]
    _print([_COLUMNS, *rows])
    for path in aside:
        log.info(f"set aside: {path}")
    if damaged := [row for row in rows if row[-1] not in ("valid", "whole")]:
        raise ArtifactError(f"{units.counted(len(damaged), 'damaged checkpoint')} of {len(rows)}",
                            expected="stage 04 takes the newest that is valid, and sets damaged "
                                     "newer ones aside")


def _row(checkpoint: Checkpoint, deep: bool) -> tuple[str, ...]:
    problems = checkpoint.problems()
    if problems:
        return (str(checkpoint.step), *[""] * (len(_COLUMNS) - 2), problems[0])
    facts, entries = checkpoint.commit(), checkpoint.manifest()["files"]
    size = sum(entry["bytes"] for entry in entries)
    if deep:
        with Progress(checkpoint.path.name, size, "B") as bar:
            for part, entry in enumerate(entries):
                problems += checkpoint.content_problems(part, len(entries))
                bar.advance(entry["bytes"])
    saved = time.strftime("%Y-%m-%d %H:%M", time.localtime(
        (checkpoint.path / commit.COMMIT).stat().st_mtime))
    return (str(checkpoint.step), saved, units.size(size), f"{facts.get('tokens', 0):,}",
            _figure(facts.get("loss")), _figure(facts.get("eval_loss")),
            problems[0] if problems else "valid" if deep else "whole")


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        *numbers, state = zip(row, widths, strict=True)
        log.info("  ".join([f"{cell:>{width}}" for cell, width in numbers] + [state[0]]).rstrip())


if __name__ == "__main__":
    sys.argv[0] = "lib.checkpoints"
    stage.run(main, only_shows=True)
