"""Find the process that prepares or trains a run, even before the run has files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from lib.core import paths
from lib.core.errors import StageError
from lib.train import command_line


def process_on(root: Path) -> tuple[int, bool]:
    """Return the process here that prepares or trains a run, and whether it is a launcher.

    If that process has started others, it is the one that a person started; 0 if there is none.
    """
    found: dict[int, tuple[int, bool]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, StageError, ValueError):
            words = (entry / "cmdline").read_text(encoding="utf-8").split("\0")[:-1]
            names = [Path(word).name for word in words]
            cwd = (entry / "cwd").readlink()
            asked = command_line.parse_options_in(
                cwd, words[names.index(command_line.SCRIPT) + 1 :]
            )
            where = cwd / (asked.save_dir or paths.OUTPUTS) / (asked.experiment_name or "")
            if names[0].startswith("python") and where.resolve() == root:
                parent = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1]
                found[int(entry.name)] = int(parent), names[1] == "supervise.py"
    first = [pid for pid, (parent, _) in found.items() if parent not in found]
    return max(((pid, found[pid][1]) for pid in first), key=lambda one: one[1], default=(0, False))
