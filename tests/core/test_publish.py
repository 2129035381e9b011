"""Atomic publish: whole under the final name or not there, through kills, races and full disks."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lib.core import manifest, publish
from lib.core.errors import DiskFullError, UsageError
from lib.core.publish import AlreadyBuilding, Build

KIND = "thing/1"


def identity(x: object = 1) -> dict:
    return {"options": {"num_dirs": x}, "inputs": {"source": "s"}}


def make(target: Path, text: str = "new", x: object = 1, overwrite: bool = False) -> None:
    """Build and publish an artifact of one file."""
    with Build(target, KIND, identity(x), overwrite) as build:
        finish(build, text)


def finish(build: Build, text: str) -> None:
    (build.dir / "f").write_text(text)
    build.publish(stage="00.py", options={}, summary={},
                  files=[manifest.file_entry(build.dir, build.dir / "f")])


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_what_is_published_is_done_and_alone(tmp_path: Path) -> None:
    target = tmp_path / "deep/corpus"
    assert not publish.is_done(target, KIND, identity(), overwrite=False)
    make(target)
    assert publish.is_done(target, KIND, identity(), overwrite=False)
    assert not publish.is_done(target, KIND, identity(), overwrite=True)
    assert names(target.parent) == ["corpus"] and names(target) == ["f", "manifest.json"]


def test_an_empty_directory_is_a_free_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    assert not publish.is_done(tmp_path / "corpus", KIND, identity(), overwrite=False)
    make(tmp_path / "corpus")
    assert (tmp_path / "corpus/f").read_text() == "new"


def test_a_difference_is_named_as_the_person_typed_it(tmp_path: Path) -> None:
    target = tmp_path / "corpus"
    make(target)
    changed = {"options": {"num_dirs": 2}, "inputs": {"source": "t"}}
    with pytest.raises(UsageError, match="other inputs or options") as caught:
        publish.is_done(target, KIND, changed, overwrite=False)
    assert caught.value.found.splitlines() == ["source: s there, t now", "--num-dirs: 1 there, 2 now"]
    assert "--overwrite" in caught.value.run
    with pytest.raises(UsageError) as caught:
        publish.is_done(target, "thing/2", identity(), overwrite=False)
    assert "format: thing/1 there, thing/2 now" in caught.value.found


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("there", ["file", "directory", "other kind", "foreign manifest"])
def test_what_is_not_ours_is_never_replaced(tmp_path: Path, there: str, overwrite: bool) -> None:
    target = tmp_path / "corpus"
    if there == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    if there == "other kind":
        (target / "manifest.json").write_text(json.dumps({"kind": "model/1", "files": []}))
    if there == "foreign manifest":
        (target / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(UsageError, match="was not made by this stage"):
        publish.is_done(target, KIND, identity(), overwrite)
    assert (target if there == "file" else target / "mine").read_text() == "mine"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Build(tmp_path / "corpus", KIND, identity(), False) as b:
        (b.dir / "half").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_resumable_build_goes_on_from_what_is_finished(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError), Build(target, KIND, identity(), False, resumable=True) as build:
        (build.dir / "part").write_text("part")
        raise OSError
    with Build(target, KIND, identity(), False, resumable=True) as build:
        assert (build.dir / "part").read_text() == "part"
        finish(build, "rest")
    assert names(tmp_path) == ["model"] and names(target) == ["f", "manifest.json", "part"]


def test_parts_of_other_options_are_not_resumed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError), Build(target, KIND, identity(1), False, resumable=True) as build:
        (build.dir / "part").write_text("part")
        raise OSError
    with Build(target, KIND, identity(2), False, resumable=True) as build:
        assert names(build.dir) == [] and names(tmp_path) == [build.dir.name]


@pytest.mark.parametrize("swap", [True, False], ids=["renameat2", "two renames"])
def test_overwrite_keeps_the_old_whole_until_it_is_replaced(tmp_path: Path, monkeypatch, swap: bool,
                                                            ) -> None:
    if not swap:
        monkeypatch.setattr(publish.ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "corpus"
    make(target, "old")
    with pytest.raises(OSError), Build(target, KIND, identity(2), overwrite=True) as build:
        (build.dir / "f").write_text("half")
        raise OSError
    assert (target / "f").read_text() == "old"
    with Build(target, KIND, identity(2), overwrite=True) as build:
        assert (target / "f").read_text() == "old"
        finish(build, "new")
    assert (target / "f").read_text() == "new" and names(tmp_path) == ["corpus"]


def test_a_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "big_disk/corpus")
    make(tmp_path / "corpus", "old")
    make(tmp_path / "corpus", "new", x=2, overwrite=True)
    assert (tmp_path / "corpus").is_symlink()
    assert (tmp_path / "big_disk/corpus/f").read_text() == "new"


@pytest.mark.parametrize("moment", ["before", "between"])
def test_a_kill_around_the_two_renames_loses_nothing(tmp_path: Path, moment: str) -> None:
    """Without renameat2 the old artifact lies under another name for an instant."""
    target = tmp_path / "corpus"
    make(target, "old")
    complete = tmp_path / "corpus.partial-12345678"
    shutil.copytree(target, complete)
    (complete / "f").write_text("new")
    if moment == "between":
        target.rename(tmp_path / "corpus.old-1")
    with Build(target, KIND, identity(2), overwrite=True):
        assert (target / "f").read_text() == "old"
    assert names(tmp_path) == ["corpus"]


def test_a_second_builder_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    target = tmp_path / "corpus"
    with Build(target, KIND, identity(), False) as build:
        for other in (identity(), identity(2)):
            second = Build(target, KIND, other, False)
            if other == identity():
                with pytest.raises(AlreadyBuilding), second:
                    pass
            else:
                with second:
                    pass
        finish(build, "first")
    assert (target / "f").read_text() == "first" and names(tmp_path) == ["corpus"]
    with pytest.raises(AlreadyBuilding, match="was built or brought back just now"), \
            Build(target, KIND, identity(), False):
        pass
    assert names(tmp_path) == ["corpus"]


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


def start(environment: dict, *argv: object) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", BUILDER, *map(str, argv)], env=environment,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_build_does_not_exist_and_is_cleaned_up(tmp_path: Path, python, environment) -> None:
    target = tmp_path / "corpus"
    with start(environment, target, "half", 60) as killed:
        killed.stdout.readline()
        python(BUILDER, target, "late", 0, expect=1)  # its lock is held
        killed.send_signal(signal.SIGKILL)
    assert not target.exists() and "corpus.partial-" in manifest.unfinished(target)
    done = python(BUILDER, target, "whole", 0)
    assert "left by a run that did not finish" in done.stdout
    assert (target / "f").read_text() == "whole"
    assert [name for name in names(tmp_path) if name.startswith("corpus")] == ["corpus"]


def test_many_builders_at_once_make_one_artifact(tmp_path: Path, environment) -> None:
    """Whoever comes late hears AlreadyBuilding, whatever the others do at that moment."""
    for attempt in range(3):
        target = tmp_path / f"corpus{attempt}"
        racers = [start(environment, target, number, 0.05) for number in range(6)]
        errors = [racer.communicate(timeout=60)[1] for racer in racers]
        winners = [n for n, racer in enumerate(racers) if racer.returncode == 0]
        assert len(winners) == 1, errors
        assert (target / "f").read_text() == str(winners[0])
        assert all("AlreadyBuilding" in text for n, text in enumerate(errors) if n not in winners)
    assert names(tmp_path) == ["corpus0", "corpus1", "corpus2"]


@pytest.mark.parametrize("state", ["removed", "published"])
def test_a_directory_that_goes_away_while_it_is_locked(tmp_path: Path, monkeypatch, state: str,
                                                       ) -> None:
    """Between the open and the lock another process may remove or publish the directory."""
    path, flock = tmp_path / "d", publish.fcntl.flock

    def vanish(*arguments: int) -> None:
        if state == "published":
            path.rename(tmp_path / "final")
        else:
            path.rmdir()
            path.mkdir()
        flock(*arguments)
    path.mkdir()
    monkeypatch.setattr(publish.fcntl, "flock", vanish)
    assert publish._lock(path) == -1
    assert publish._lock(tmp_path / "none") == -1


@pytest.fixture
def small_disk(tmp_path: Path):
    """Return an empty file system of 1 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)],
            capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_told_and_leaves_nothing(small_disk: Path, python) -> None:
    done = python("""
import sys
from pathlib import Path
from lib.core import publish, stage
def main(argv):
    with publish.Build(Path(argv[0]), "thing/1", {}, False) as build:
        (build.dir / "f").write_bytes(bytes(4 << 20))
stage.run(main)
""", small_disk / "corpus", expect=4)
    assert "no room to write" in done.stderr and "Traceback" not in done.stderr
    assert names(small_disk) == []
    with pytest.raises(DiskFullError, match="not enough room for the dataset") as caught:
        publish.require_space(small_disk / "not/yet/there", 2 << 20, "the dataset")
    assert caught.value.found == "1.0 MB free"
    publish.require_space(small_disk, 1 << 19, "the dataset")
