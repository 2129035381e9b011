"""What checkpoints an experiment has.

  python -m lib.checkpoints list outputs/exp        sizes and figures; COMMIT, manifest and sizes
  python -m lib.checkpoints verify outputs/exp      … and every byte against its digest

Exits with 3 when one is damaged, with 1 when a disk fails to read one. Nothing is changed or
moved: stage 04 does that when it resumes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from lib.checkpoints import aside, commit
from lib.checkpoints.commit import Checkpoint
from lib.core import log, options, paths, stage, units
from lib.core.errors import ArtifactError, StageError, UsageError
from lib.core.progress import Progress

_COLUMNS = ("step", "saved", "size", "tokens", "loss", "validation", "state")


def main(argv: list[str]) -> None:
    """Print the table. Raises ArtifactError for a damaged one, StageError for an unreadable one."""
    parser = options.Parser(__doc__)
    parser.add_argument("action", choices=("list", "verify"), help="what to do")
    parser.add_argument(
        "experiment",
        metavar="NAME|DIR",
        help="the run: its name, for outputs/NAME, or its directory, or the "
        "checkpoints directory in it",
    )
    opts = parser.parse(argv)
    run = paths.existing_experiment(opts.experiment)
    directory = run.checkpoints if run.checkpoints.is_dir() else run.root
    found = commit.scan(directory)
    set_aside = commit.quarantined(directory)
    if not found and not set_aside:
        raise UsageError(
            f"no checkpoints in {directory}", expected="outputs/<exp> of a run that has saved"
        )
    rows = []
    unread = 0
    damaged = 0
    for checkpoint in reversed(found):
        try:
            rows.append(_row(checkpoint, opts.action == "verify"))
            damaged += rows[-1][-1] not in ("valid", "whole")
        except (OSError, StageError) as error:
            rows.append(_without_facts(checkpoint, str(error)))
            unread += 1
    _print([_COLUMNS, *rows])
    for path in set_aside:
        log.info(f"set aside: {path}")
    if opts.action == "verify":
        _tell_whole(directory)
    if damaged:
        raise ArtifactError(
            f"{units.counted(damaged, 'damaged checkpoint')} of {len(rows)}",
            expected="stage 04 takes the newest that is valid, and sets damaged newer ones aside",
        )
    if unread:
        raise StageError(
            f"of {units.counted(len(rows), 'checkpoint')}, {unread} cannot be read",
            expected="a disk and a mount that answer (`dmesg` tells more)",
        )


def _tell_whole(checkpoints: Path) -> None:
    """Say which of those set aside are whole, and how they come back."""
    for checkpoint in aside.unread(checkpoints):
        if not checkpoint.problems() + checkpoint.content_problems(0, 1):
            log.info(
                "whole, and set aside only because a disk failed to read it; it comes back "
                f"by: {aside.brought_back(checkpoint)}"
            )


def _row(checkpoint: Checkpoint, deep: bool) -> tuple[str, ...]:
    problems = checkpoint.problems()
    if problems:
        return _without_facts(checkpoint, problems[0])
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
    return (
        str(checkpoint.step),
        saved,
        units.size(size),
        _figure(facts.get("tokens"), ","),
        _figure(facts.get("loss")),
        _figure(facts.get("eval_loss")),
        next(iter(problems), "valid" if deep else "whole"),
    )


def _without_facts(checkpoint: Checkpoint, state: str) -> tuple[str, ...]:
    return (str(checkpoint.step), *[""] * (len(_COLUMNS) - 2), state)


def _figure(value: object, form: str = ".4f") -> str:
    """Return a number as text, "" if the value is not a number."""
    return f"{value:{form}}" if isinstance(value, (int, float)) and abs(value) < 1e18 else ""


def _print(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_COLUMNS))]
    for row in rows:
        *numbers, state = zip(row, widths, strict=True)
        log.info("  ".join([f"{cell:>{width}}" for cell, width in numbers] + [state[0]]).rstrip())


if __name__ == "__main__":
    sys.argv[0] = "lib.checkpoints"
    stage.run(main, only_shows=True)
