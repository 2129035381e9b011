"""Commands of stages and of a curation for tests that kill them, and checks of what they leave."""

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
from tests.fault_points import Fault, read_operations
from tests.hub_models import NAME, SHARDS, USER_VARIABLES, change_config, hub_variables
from tests.hub_server import HubServer, Repo
from tests.training import SEQ_LENGTH

SCRIPTS = {int(path.name[:2]): path.name for path in ROOT.glob("0[1-5]_*.py")}
UNIT_BYTES = 100_000  # of a work unit of stage 02, in which a file counts at least 16,000
# A user's own files beside an artifact, with names like those of unfinished work.
_USER_FILES = {
    "splits.partial-keepme/a.txt": "mine",
    "hf_datasets/corpus.old-2025/a.txt": "mine",
    "hf_datasets/corpus.partial-12345678/a.txt": "mine",
    ".cache/models/org--tiny-llama.partial-mine/a.txt": "mine",
}


@dataclass(frozen=True)
class Command:
    """A command line and the project that it is typed in.

    target: path of the artifact in the project. free: globs of other paths in the project that the
    command may change or delete before it ends. script: if it is not the one of the stage.
    """

    name: str
    stage: int
    argv: tuple[object, ...]
    project: Path
    target: str
    free: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    script: str = ""

    def start(self, project: Path, fault: Fault | None = None) -> forks.Launch:
        """Start the command in a copy of the project."""
        environment = {
            name: value for name, value in os.environ.items() if name not in USER_VARIABLES
        }
        (temporary := project.with_name(f"{project.name}.tmp")).mkdir(exist_ok=True)
        environment |= {**forks.CPU_VARIABLES, "TMPDIR": str(temporary), **dict(self.environment)}
        with (temporary / "output.txt").open("ab") as output:
            return forks.Launch(
                forks.get_server("stages").start(
                    str(ROOT / (self.script or SCRIPTS[self.stage])),
                    self.argv,
                    project,
                    environment,
                    output.fileno(),
                    output.fileno(),
                    before="tests.kills:prepare_process",
                    given={"fault": asdict(fault) if fault else None},
                )
            )

    def run(self, project: Path, fault: Fault | None = None, expect: int = 0) -> None:
        """Run the command to its end and assert its exit code."""
        codes = self.start(project, fault).wait()
        assert codes == [expect], f"{self.name}: exit {codes[0]}\n{read_output(project)}"


def read_output(project: Path) -> str:
    """Return the end of the output of the commands in a project."""
    return project.with_name(f"{project.name}.tmp").joinpath("output.txt").read_text()[-3000:]


def prepare_process(rank: int, fault: dict[str, Any] | None) -> None:
    """Divide the work of stage 02 or a curation into many small units, and install the fault."""
    from lib.corpus import dataset, shards, work_units
    from lib.curate import output, reader

    # Then it records its progress after each unit, and writes several shards.
    work_units.UNIT_BYTES = UNIT_BYTES
    dataset.NOTE_BYTES = 1
    shards.SHARD_BYTES = 20_000
    reader.UNIT_BYTES = 20_000
    output._NOTE_BYTES = 1
    if fault:
        Fault(**fault).install()


class Scene:
    """A command, and the project before it and after it without a fault.

    before, after: contents by path, of `read_tree`. operations: number of file operations of its
    main process. seconds: duration of the command.
    """

    def __init__(self, command: Command, folder: Path) -> None:
        self.command = command
        self._folder = folder
        self._copies = 0
        folder.mkdir()
        self.before = read_tree(command.project)
        project = self.copy()
        report = folder / "operations.txt"
        began = time.monotonic()
        command.run(project, Fault(str(project), report=str(report)))
        self.seconds = time.monotonic() - began
        self.operations = len(read_operations(report))
        self.after = read_tree(project)
        assert self.after != self.before, read_output(project)

    def copy(self) -> Path:
        """Return a new copy of the project as it was before the command."""
        self._copies += 1
        project = self._folder / f"copy_{self._copies:04d}"
        shutil.copytree(self.command.project, project, symlinks=True)
        return project

    def require_nothing_lost(self, project: Path) -> None:
        """Assert that a kill has lost nothing.

        The artifact must be the complete old one (if there was none: missing) or the complete new
        one. Otherwise the project contains only its old files and unfinished work.
        """
        now = read_tree(project)
        target = self.command.target
        versions = [take_subtree(tree, target) for tree in (self.before, self.after)]
        assert self._may_change(target) or take_subtree(now, target) in versions, (
            f"{self.command.name}: {target} is neither the old nor the new one: "
            f"{sorted(take_subtree(now, target).items() ^ versions[1].items())[:8]}"
        )
        others = {path: content for path, content in now.items() if not self._is_own(path)}
        before = {path: content for path, content in self.before.items() if not self._is_own(path)}
        assert others == before, f"{self.command.name}: {sorted(others.items() ^ before.items())}"

    def require_done(self, project: Path) -> None:
        """Assert that the project is as it would be without a fault."""
        now = read_tree(project)
        assert now == self.after, (
            f"{self.command.name}: {sorted(now.items() ^ self.after.items())[:8]}\n"
            f"{read_output(project)}"
        )
        shutil.rmtree(project)
        shutil.rmtree(project.with_name(f"{project.name}.tmp"))

    def _is_own(self, path: str) -> bool:
        target = self.command.target
        if path in self.before and path not in take_subtree(self.before, target):
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
    """Return whether a path is a directory or in it."""
    return path == directory or path.startswith(f"{directory}/")


def take_subtree(tree: dict[str, str], directory: str) -> dict[str, str]:
    """Return the part of a tree that is in a directory."""
    return {path: content for path, content in tree.items() if is_below(path, directory)}


def read_tree(root: Path) -> dict[str, str]:
    """Return the contents of a directory by relative path, without the times in manifests."""
    contents = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink():
            contents[name] = f"link to {path.readlink()}"
        elif path.is_dir():
            contents[name] = "directory"
        else:
            contents[name] = _read_content(path)
    return contents


def _read_content(path: Path) -> str:
    from lib.core import hashing

    try:
        manifest = json.loads(path.read_bytes()) if path.name == "manifest.json" else None
    except ValueError:
        manifest = None
    if isinstance(manifest, dict) and "created" in manifest:
        return hashing.fingerprint({**manifest, "created": None})
    return hashing.file_digest(path)


def kill_launch(launch: forks.Launch, with_workers: bool) -> bool:
    """Kill a launch if it still runs, wait for its end, and return whether it was killed.

    with_workers: kill all of its processes, as when a job ends. Otherwise kill only the first, as
    when memory runs out; its workers then end by themselves.
    """
    if with_workers and not launch.poll():
        os.killpg(launch.pids[0], signal.SIGKILL)
    launch.kill()
    return launch.codes == [-signal.SIGKILL]


class Commands:
    """Makes the commands in a directory, with a Hub on this machine."""

    def __init__(self, prepared: Path, model_files: dict[str, bytes], folder: Path) -> None:
        """prepared: of `training.prepare_project`. folder: an empty directory."""
        self._prepared = prepared
        self._files = model_files
        self._folder = folder
        self._hubs = [
            HubServer().__enter__(),
            HubServer().__enter__(),
        ]  # the second has a newer commit of the model

    def close(self) -> None:
        """End both Hubs."""
        for hub in self._hubs:
            hub.__exit__()

    def of_stage(self, stage: int) -> Iterator[Command]:
        """Yield the commands of a stage."""
        yield from {1: self._stage_01, 2: self._stage_02, 3: self._stage_03, 5: self._stage_05}[
            stage
        ]()

    def _project(self, name: str, *parts: str) -> Path:
        """Return a new project with directories of the prepared one and a user's own files."""
        project = self._folder / name
        for part in parts:
            shutil.copytree(self._prepared / part, project / part)
        for path, text in _USER_FILES.items():
            (project / path).parent.mkdir(parents=True)
            (project / path).write_text(text)
        return project

    def _stage_01(self) -> Iterator[Command]:
        options = ("--num-dirs", 3, "--mode", "copy", "--num-workers", 2)
        yield Command("copies", 1, options, self._project("01_copies", "raw_text"), "splits")
        built = self._project("01_again", "raw_text")
        run_stage(SCRIPTS[1], "--num-dirs", 2, cwd=built)
        yield Command("replaced", 1, (*options, "--overwrite"), built, "splits")
        large = self._project("01_many")
        for number in range(1200):  # enough for worker processes to link them
            (file := large / f"raw_text/{number % 7}/{number}.txt").parent.mkdir(
                parents=True, exist_ok=True
            )
            file.write_text("x" * (number % 50 + 1))
        yield Command("links by workers", 1, ("--num-dirs", 3, "--num-workers", 2), large, "splits")

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
        built = self._project("02_again", "splits")
        run_stage(SCRIPTS[2], cwd=built)
        yield Command("replaced", 2, (*options, "--overwrite"), built, target)
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
        near = ("--dedup", "near", "--near-keep", "upsample", "--num-workers", 2, "--no-progress")
        yield Command(
            "near",
            2,
            ("hf_datasets/corpus", *near, "--save-dir", "hf_datasets/near"),
            self._copy(built, "02_near"),
            "hf_datasets/near",
            script="lib/curate/__main__.py",
        )

    def _stage_03(self) -> Iterator[Command]:
        hub, changed_hub = self._hubs
        hub.repos[NAME] = Repo(self._files, slow=0.01)
        shard = self._files[SHARDS[1]]
        changed_shard = shard[:-1000] + bytes(reversed(shard[-1000:]))
        changed_hub.repos[NAME] = Repo(
            {**self._files, SHARDS[1]: changed_shard}, commit="1" * 40, slow=0.01
        )
        change_config(changed_hub.repos[NAME], initializer_range=0.03)
        hub.repos["org/text"] = Repo(
            {
                f"{folder}/{number}.jsonl.gz": bytes([number]) * 70_000
                for folder in ("en", "de")
                for number in range(3)
            },
            kind="dataset",
            slow=0.01,
        )
        hub_environment, changed_environment = (
            tuple(hub_variables(server, self._folder / "hf_home").items()) for server in self._hubs
        )
        target = ".cache/models/org--tiny-llama"
        fetch = ("--model-name", NAME)
        yield Command("model", 3, fetch, self._project("03_model"), target, (), hub_environment)
        fetched = self._project("03_again")
        run_stage(SCRIPTS[3], *fetch, cwd=fetched, env=dict(hub_environment))
        yield Command(
            "model again", 3, (*fetch, "--overwrite"), fetched, target, (), changed_environment
        )
        dataset_options = ("--dataset-name", "org/text", "--include")
        partial = self._project("03_text")
        run_stage(SCRIPTS[3], *dataset_options, "en/*", cwd=partial, env=dict(hub_environment))
        yield Command(
            "more of a dataset",
            3,
            (*dataset_options, "de/*"),
            partial,
            "raw_text/org--text/.hub",
            ("raw_text/org--text/de", "raw_text/org--text/de/*"),
            hub_environment,
        )
        scratch_options = (
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
            scratch_options,
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
        shard_options = ("--max-shard-size", "40KB")
        yield Command("new", 5, ("-e", "run", *shard_options), project, target)
        exported = self._copy(project, "05_again")
        run_stage(SCRIPTS[5], "-e", "run", cwd=exported)
        yield Command(
            "replaced",
            5,
            ("-e", "run", *shard_options, "--dtype", "float16", "--overwrite"),
            exported,
            target,
        )

    def _copy(self, project: Path, name: str, *parts: str) -> Path:
        for part in parts or [""]:
            shutil.copytree(project / part, self._folder / name / part)
        return self._folder / name
