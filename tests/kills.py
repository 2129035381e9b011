"""Commands of stages 01, 02, 03 and 05 to kill, and what must exist then and at the end."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests import forks
from tests.conftest import ROOT, run_stage
from tests.fault_points import Fault, operations
from tests.hub_models import ELSEWHERE, NAME, SHARDS, change_config, reaching
from tests.hub_server import HubServer, Repo
from tests.training import SEQ_LENGTH

SCRIPTS = {int(path.name[:2]): path.name for path in ROOT.glob("0[1-5]_*.py")}
UNIT_BYTES = 100_000  # of a unit of stage 02; a small file counts as much as 16,000
# What a user may have beside an artifact, under names like those of unfinished work.
_OF_USER = {
    "splits.partial-keepme/a.txt": "mine",
    "hf_datasets/corpus.old-2025/a.txt": "mine",
    "hf_datasets/corpus.partial-12345678/a.txt": "mine",
    ".cache/models/org--tiny-llama.partial-mine/a.txt": "mine",
}


@dataclass(frozen=True)
class Command:
    """A command line and the project that it is typed in.

    target: the artifact it makes, relative to the project. free: globs of what it may change or
    delete besides, as paths relative to the project, before it has ended.
    """

    name: str
    stage: int
    argv: tuple[object, ...]
    project: Path
    target: str
    free: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def start(self, project: Path, fault: Fault | None = None) -> forks.Launch:
        """Start it in a copy of the project."""
        environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
        (elsewhere := project.with_name(f"{project.name}.tmp")).mkdir(exist_ok=True)
        environment |= {**forks.CPU, "TMPDIR": str(elsewhere), **dict(self.environment)}
        with (elsewhere / "output.txt").open("ab") as output:
            return forks.Launch(
                forks.server("stages").start(
                    str(ROOT / SCRIPTS[self.stage]),
                    self.argv,
                    project,
                    environment,
                    output.fileno(),
                    output.fileno(),
                    before="tests.kills:prepare",
                    given={"fault": asdict(fault) if fault else None},
                )
            )

    def run(self, project: Path, fault: Fault | None = None, expect: int = 0) -> None:
        """Run it to its end and assert the exit code."""
        codes = self.start(project, fault).wait()
        assert codes == [expect], f"{self.name}: exit {codes[0]}\n{said(project)}"


def said(project: Path) -> str:
    """Return the end of what the commands in a project have printed."""
    return project.with_name(f"{project.name}.tmp").joinpath("output.txt").read_text()[-3000:]


def prepare(rank: int, fault: dict[str, Any] | None) -> None:
    """Make the work of stage 02 many small units, and have the fault happen."""
    from lib.corpus import dataset, shards, work_units

    # So that its progress is noted after each unit, and there are several shards.
    work_units.UNIT_BYTES = UNIT_BYTES
    dataset.NOTE_BYTES = 1
    shards.SHARD_BYTES = 20_000
    if fault:
        Fault(**fault).install()


class Scene:
    """A command, what is there before it, and what it leaves when nothing disturbs it.

    operations: how many there are in its main process. seconds: that it takes.
    """

    def __init__(self, command: Command, folder: Path) -> None:
        self.command = command
        self._folder = folder
        self._copies = 0
        folder.mkdir()
        self.before = tree(command.project)
        project = self.copy()
        report = folder / "operations.txt"
        began = time.monotonic()
        command.run(project, Fault(str(project), report=str(report)))
        self.seconds = time.monotonic() - began
        self.operations = len(operations(report))
        self.after = tree(project)
        assert self.after != self.before, said(project)

    def copy(self) -> Path:
        """Return a copy of the project as it is before the command."""
        self._copies += 1
        project = self._folder / f"copy_{self._copies:04d}"
        shutil.copytree(self.command.project, project, symlinks=True)
        return project

    def require_nothing_lost(self, project: Path) -> None:
        """Assert what holds after a kill at any moment.

        The artifact is the old one or the new one, whole (absent counts as the old one where there
        was none), and there is nothing else but what was there before and unfinished work.
        """
        now = tree(project)
        target = self.command.target
        versions = [of(found, target) for found in (self.before, self.after)]
        assert self._may_change(target) or of(now, target) in versions, (
            f"{self.command.name}: {target} is neither the old nor the new one: "
            f"{sorted(of(now, target).items() ^ versions[1].items())[:8]}"
        )
        others = {path: content for path, content in now.items() if not self._is_own(path)}
        before = {path: content for path, content in self.before.items() if not self._is_own(path)}
        assert others == before, f"{self.command.name}: {sorted(others.items() ^ before.items())}"

    def require_done(self, project: Path) -> None:
        """Assert that all is as if nothing had disturbed the command."""
        now = tree(project)
        assert now == self.after, (
            f"{self.command.name}: {sorted(now.items() ^ self.after.items())[:8]}\n{said(project)}"
        )
        shutil.rmtree(project)
        shutil.rmtree(project.with_name(f"{project.name}.tmp"))

    def _is_own(self, path: str) -> bool:
        target = self.command.target
        if path in self.before and path not in of(self.before, target):
            return self._may_change(path)
        return (
            is_below(path, target)
            or path.startswith(f"{target}.partial-")
            or is_below(target, path)
            or self._may_change(path)
        )

    def _may_change(self, path: str) -> bool:
        return any(fnmatch.fnmatch(path, glob) for glob in self.command.free)


def is_below(path: str, directory: str) -> bool:
    """Tell whether a path is that of a directory or of something in it."""
    return path == directory or path.startswith(f"{directory}/")


def of(found: dict[str, str], directory: str) -> dict[str, str]:
    """Return the part of a tree that is a directory."""
    return {path: content for path, content in found.items() if is_below(path, directory)}


def tree(root: Path) -> dict[str, str]:
    """Return what lies in a directory by its relative path; the time in a manifest is left out."""
    found = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_dir():
            found[name] = "directory"
        else:
            found[name] = _content(path)
    return found


def _content(path: Path) -> str:
    from lib.core import hashing

    try:
        made = json.loads(path.read_bytes()) if path.name == "manifest.json" else None
    except ValueError:
        made = None
    if isinstance(made, dict) and "created" in made:
        return hashing.fingerprint({**made, "created": None})
    return hashing.file_digest(path)


def kill(launch: forks.Launch, with_workers: bool) -> bool:
    """Kill a launch, if it still runs, and wait for its end; tell whether it was killed.

    with_workers: all of its processes, as the end of a job does; else, as when memory runs out,
    only the first, whose workers end by themselves.
    """
    if with_workers and not launch.poll():
        os.killpg(launch.pids[0], signal.SIGKILL)
    launch.kill()
    return launch.codes == [-signal.SIGKILL]


class Commands:
    """Makes the commands, with a Hub on this machine, in a directory of its own."""

    def __init__(self, prepared: Path, model_files: dict[str, bytes], folder: Path) -> None:
        """prepared: see training.prepare."""
        self._prepared = prepared
        self._files = model_files
        self._folder = folder
        self._hubs = [HubServer().__enter__(), HubServer().__enter__()]  # the second one: later

    def close(self) -> None:
        """End the Hub."""
        for hub in self._hubs:
            hub.__exit__()

    def of_stage(self, stage: int) -> Iterator[Command]:
        """Yield the commands of a stage."""
        yield from {1: self._stage_01, 2: self._stage_02, 3: self._stage_03, 5: self._stage_05}[
            stage
        ]()

    def _project(self, name: str, *parts: str) -> Path:
        """Return a new project with some parts of the prepared one, and a user's own files."""
        project = self._folder / name
        for part in parts:
            shutil.copytree(self._prepared / part, project / part)
        for path, text in _OF_USER.items():
            (project / path).parent.mkdir(parents=True)
            (project / path).write_text(text)
        return project

    def _stage_01(self) -> Iterator[Command]:
        copied = ("--num-dirs", 3, "--mode", "copy", "--num-workers", 2)
        yield Command("copies", 1, copied, self._project("01_copies", "raw_text"), "splits")
        again = self._project("01_again", "raw_text")
        run_stage(SCRIPTS[1], "--num-dirs", 2, cwd=again)
        yield Command("replaced", 1, (*copied, "--overwrite"), again, "splits")
        many = self._project("01_many")
        for number in range(1200):  # so many that worker processes place them
            (file := many / f"raw_text/{number % 7}/{number}.txt").parent.mkdir(
                parents=True, exist_ok=True
            )
            file.write_text("x" * (number % 50 + 1))
        yield Command("links by workers", 1, ("--num-dirs", 3, "--num-workers", 2), many, "splits")

    def _stage_02(self) -> Iterator[Command]:
        target = "hf_datasets/corpus"
        parts = "hf_datasets/corpus.parts"
        options = (
            "--validation-percent",
            15,
            "--dedup",
            "exact",
            "--keep-source",
            "--num-workers",
            2,
        )
        new = self._project("02_new", "splits")
        yield Command("new", 2, options, new, target)
        again = self._project("02_again", "splits")
        run_stage(SCRIPTS[2], cwd=again)
        yield Command("replaced", 2, (*options, "--overwrite"), again, target)
        for_merge = self._project("02_merge", "splits")
        yield Command(
            "parts",
            2,
            (*options, "--only-splits", "0-2"),
            self._copy(for_merge, "02_parts"),
            parts,
            (f"{parts}*",),
        )
        Command("parts", 2, (*options, "--only-splits", "0-2"), for_merge, parts).run(for_merge)
        yield Command("merged", 2, (*options, "--merge"), for_merge, target, (f"{parts}*",))

    def _stage_03(self) -> Iterator[Command]:
        hub, later = self._hubs
        hub.repos[NAME] = Repo(self._files, slow=0.01)
        shard = self._files[SHARDS[1]]
        changed = shard[:-1000] + bytes(reversed(shard[-1000:]))
        later.repos[NAME] = Repo({**self._files, SHARDS[1]: changed}, commit="1" * 40, slow=0.01)
        change_config(later.repos[NAME], initializer_range=0.03)
        hub.repos["org/text"] = Repo(
            {
                f"{folder}/{number}.jsonl.gz": bytes([number]) * 70_000
                for folder in ("en", "de")
                for number in range(3)
            },
            kind="dataset",
            slow=0.01,
        )
        there, then = (
            tuple(reaching(server, self._folder / "hf_home").items()) for server in self._hubs
        )
        target = ".cache/models/org--tiny-llama"
        fetch = ("--model-name", NAME)
        yield Command("model", 3, fetch, self._project("03_model"), target, (), there)
        again = self._project("03_again")
        run_stage(SCRIPTS[3], *fetch, cwd=again, env=dict(there))
        yield Command("model again", 3, (*fetch, "--overwrite"), again, target, (), then)
        text = ("--dataset-name", "org/text", "--include")
        more = self._project("03_text")
        run_stage(SCRIPTS[3], *text, "en/*", cwd=more, env=dict(there))
        yield Command(
            "more of a dataset",
            3,
            (*text, "de/*"),
            more,
            "raw_text/org--text/.hub",
            ("raw_text/org--text/de", "raw_text/org--text/de/*"),
            there,
        )
        scratch = (
            "--from-scratch",
            "--model-size",
            "tiny",
            "--vocab-size",
            400,
            "--train-tokenizer",
            "hf_datasets/corpus",
        )
        yield Command(
            "from scratch",
            3,
            scratch,
            self._copy(self._prepared, "03_scratch", "hf_datasets"),
            ".cache/models/scratch-tiny",
        )

    def _stage_05(self) -> Iterator[Command]:
        project = self._project("05_new", "hf_datasets", "model")
        run_stage(
            SCRIPTS[4],
            "-e",
            "run",
            "-d",
            "corpus",
            "-m",
            "model",
            "-s",
            SEQ_LENGTH,
            "--max-steps",
            2,
            "--ckpt-freq",
            1,
            "--eval-freq",
            0,
            cwd=project,
        )
        target = "outputs/run/export/step_00000002"
        sharded = ("--max-shard-size", "40KB")
        yield Command("new", 5, ("-e", "run", *sharded), project, target)
        again = self._copy(project, "05_again")
        run_stage(SCRIPTS[5], "-e", "run", cwd=again)
        yield Command(
            "replaced",
            5,
            ("-e", "run", *sharded, "--dtype", "float16", "--overwrite"),
            again,
            target,
        )

    def _copy(self, project: Path, name: str, *parts: str) -> Path:
        for part in parts or [""]:
            shutil.copytree(project / part, self._folder / name / part)
        return self._folder / name
