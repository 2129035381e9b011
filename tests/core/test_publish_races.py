# covers: lib/core/publish.py, lib/core/lease.py
"""Publish artifacts with killed processes, races and full disks."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lib.core import lease, manifest, publish
from lib.core.errors import DiskFullError


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


BUILDER = """
import sys, time
from pathlib import Path
from lib.core import log, manifest, publish
log.setup()
target, text = Path(sys.argv[1]), sys.argv[2]
with publish.Build(target, "thing/1", {"options": {"num_dirs": 1}, "inputs": {"source": "s"}},
                   False) as build:
    (build.dir / "f").write_text(text)
    print("building", flush=True)
    time.sleep(float(sys.argv[3]))
    build.publish(stage="00.py", options={}, summary={},
                  files=[manifest.file_entry(build.dir, build.dir / "f")])
"""


def start_builder(environment: dict, *argv: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", BUILDER, *map(str, argv)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_killed_build_does_not_exist_and_is_cleaned_up(
    tmp_path: Path, python, environment
) -> None:
    target = tmp_path / "corpus"
    with start_builder(environment, target, "half", 60) as killed:
        killed.stdout.readline()
        python(BUILDER, target, "late", 0, expect=1)  # its lock is held
        killed.send_signal(signal.SIGKILL)
    assert not target.exists() and "corpus.partial-" in manifest.describe_leftovers(target)
    done = python(BUILDER, target, "whole", 0)
    assert "did not finish" in done.stdout
    assert (target / "f").read_text() == "whole"
    assert names(tmp_path) == ["corpus"]


def test_many_builders_at_once_make_one_artifact(tmp_path: Path, environment) -> None:
    """The others get AlreadyBuilding, whatever the first one does at that moment."""
    for attempt in range(3):
        target = tmp_path / f"corpus{attempt}"
        racers = [start_builder(environment, target, number, 0.05) for number in range(6)]
        errors = [racer.communicate(timeout=60)[1] for racer in racers]
        winners = [n for n, racer in enumerate(racers) if racer.returncode == 0]
        assert len(winners) == 1, errors
        assert (target / "f").read_text() == str(winners[0])
        assert all("AlreadyBuilding" in text for n, text in enumerate(errors) if n not in winners)
    assert names(tmp_path) == ["corpus0", "corpus1", "corpus2"]


@pytest.mark.parametrize("state", ["removed", "published"])
def test_a_directory_that_disappears_is_not_locked(tmp_path: Path, monkeypatch, state: str) -> None:
    """Between the open and the lock another process may remove or publish the directory."""
    path = tmp_path / "d"
    flock = lease.fcntl.flock

    def vanish(*arguments: int) -> None:
        if state == "published":
            path.rename(tmp_path / "final")
        else:
            path.rmdir()
            path.mkdir()
        flock(*arguments)

    path.mkdir()
    monkeypatch.setattr(lease.fcntl, "flock", vanish)
    assert lease.lock_path(path) == -1
    assert lease.lock_path(tmp_path / "none") == -1


@pytest.fixture
def small_disk(tmp_path: Path):
    """Return an empty file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if (
        shutil.which("mount") is None
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True
        ).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_reported_and_leaves_nothing(small_disk: Path, python) -> None:
    done = python(
        """
import sys
from pathlib import Path
from lib.core import publish, stage
def main(argv):
    with publish.Build(Path(argv[0]), "thing/1", {}, False) as build:
        (build.dir / "f").write_bytes(bytes(4 << 20))
stage.run_main(main)
""",
        small_disk / "corpus",
        expect=4,
    )
    assert "no room to write" in done.stderr and "Traceback" not in done.stderr
    assert names(small_disk) == []
    with pytest.raises(DiskFullError, match="not enough room") as caught:
        publish.require_space(small_disk / "not/yet/there", 2 << 20, "the dataset")
    assert caught.value.found == "1.0 MB free"
    publish.require_space(small_disk, 1 << 19, "the dataset")
