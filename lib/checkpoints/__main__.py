"""List or verify the checkpoints of a run.

  python -m lib.checkpoints list outputs/exp        check COMMIT.json, manifest and sizes
  python -m lib.checkpoints verify outputs/exp      also check every file against its digest

The exit code is 3 if a checkpoint is damaged, and 1 if a disk fails to read one. The command
changes nothing; stage 04 quarantines damaged checkpoints when it resumes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.core import log, options, paths, stage, units
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.progress import Progress

_COLUMNS = ("step", "saved", "size", "tokens", "loss", "validation", "state")


def main(argv: list[str]) -> None:
    """Print the table of checkpoints.

    Raises ArtifactError if one is damaged, and StageError if one cannot be read.
    """
    parser = options.Parser(__doc__)
    parser.add_argument(
        "action",
        choices=("list", "verify"),
        help="list: check COMMIT.json, manifest and sizes; verify: also hash all files",
    )
    parser.add_argument(
        "experiment",
        metavar="NAME|DIR",
        help="name of a run, for outputs/NAME; its directory; or a directory of checkpoints",
    )
    opts = parser.parse(argv)
    run = paths.existing_experiment(opts.experiment)
    directory = run.checkpoints if run.checkpoints.is_dir() else run.root
    checkpoints = commit.list_checkpoints(directory)
    in_quarantine = commit.list_quarantined(directory)
    if not checkpoints and not in_quarantine:
        raise UsageError(
            f"no checkpoints in {directory}", expected="outputs/<exp> of a run that has saved"
        )
    rows = []
    unreadable = 0
    damaged = 0
    for checkpoint in reversed(checkpoints):
        try:
            rows.append(_make_row(checkpoint, opts.action == "verify"))
            damaged += rows[-1][-1] not in ("valid", "complete")
        except (OSError, StageError) as error:
            rows.append(_make_empty_row(checkpoint, str(error)))
            unreadable += 1
    _print_table([_COLUMNS, *rows])
    for path in in_quarantine:
        log.info(f"in quarantine: {path}")
    if opts.action == "verify":
        _log_restorable(directory)
    if damaged:
        raise ArtifactError(
            f"{units.counted(damaged, 'damaged checkpoint')} of {len(rows)}",
            hint="stage 04 resumes from the newest valid one, and quarantines damaged newer ones",
        )
    if unreadable:
        raise StageError(
            f"{unreadable} of {units.counted(len(rows), 'checkpoint')} cannot be read",
            hint="check the disk and the mount (`dmesg` shows their errors)",
        )


def _log_restorable(checkpoints: Path) -> None:
    """Log which quarantined checkpoints are intact, and the command that restores each."""
    for checkpoint in commit.list_unreadable(checkpoints):
        if not checkpoint.problems() + checkpoint.content_problems(0, 1):
            log.info(
                f"{checkpoint.path.name} is intact; it is in quarantine only because a disk failed "
                f"to read it. To restore it: {commit.restore_command(checkpoint)}"
            )


def _make_row(checkpoint: Checkpoint, deep: bool) -> tuple[str, ...]:
    """Return a checkpoint's row of the table. deep: hash all files."""
    problems = checkpoint.problems()
    if problems:
        return _make_empty_row(checkpoint, problems[0])
    facts = checkpoint.commit()
    entries = checkpoint.manifest()["files"]
    size = sum(entry["bytes"] for entry in entries)
    if deep:
        with Progress(checkpoint.path.name, size, "B") as bar:
            for part, entry in enumerate(entries):
                problems += checkpoint.content_problems(part, len(entries))
                bar.advance(entry["bytes"])
    saved = time.strftime(
        "%Y-%m-%d %H:%M", time.localtime((checkpoint.path / commit.COMMIT).stat().st_mtime)
    )
    state = "valid" if deep else "complete"
    return (
        str(checkpoint.step),
        saved,
        units.size(size),
        _format_number(facts.get("tokens"), ","),
        _format_number(facts.get("loss")),
        _format_number(facts.get("eval_loss")),
        problems[0] if problems else state,
    )


def _make_empty_row(checkpoint: Checkpoint, state: str) -> tuple[str, ...]:
    return (str(checkpoint.step), *[""] * (len(_COLUMNS) - 2), state)


def _format_number(value: object, form: str = ".4f") -> str:
    """Return a number as text, or "" if the value is not a number."""
    return f"{value:{form}}" if isinstance(value, (int, float)) and abs(value) < 1e18 else ""


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        *numbers, state = zip(row, widths, strict=True)
        log.info("  ".join([f"{cell:>{width}}" for cell, width in numbers] + [state[0]]).rstrip())


if __name__ == "__main__":
    sys.argv[0] = "lib.checkpoints"
    stage.run_main(main, only_shows=True)
