# covers: lib/core/publish.py, lib/core/partial_dirs.py, lib/core/identity.py
# covers: lib/core/other_files.py
"""Artifacts appear under their final name complete, or not at all."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lib.core import lease, manifest, partial_dirs, publish
from lib.core.errors import ArtifactError, UsageError
from lib.core.identity import find_differences
from lib.core.publish import AlreadyBuilding, Build
from tests.fault_points import Fault

KIND = "thing/1"


def identity(x: object = 1) -> dict:
    return {"options": {"num_dirs": x}, "inputs": {"source": "s"}}


def publish_file(target: Path, text: str = "new", x: object = 1, overwrite: bool = False) -> None:
    """Build and publish an artifact of one file."""
    with Build(target, KIND, identity(x), overwrite) as build:
        finish_build(build, text)


def finish_build(build: Build, text: str) -> None:
    (build.dir / "f").write_text(text)
    build.publish(
        stage="00.py",
        options={},
        summary={},
        files=[manifest.file_entry(build.dir, build.dir / "f")],
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_published_artifact_is_done_without_leftovers(tmp_path: Path) -> None:
    target = tmp_path / "deep/corpus"
    assert not publish.is_done(target, KIND, identity(), overwrite=False)
    publish_file(target)
    assert publish.is_done(target, KIND, identity(), overwrite=False)
    assert not publish.is_done(target, KIND, identity(), overwrite=True)
    assert names(target.parent) == ["corpus"] and names(target) == ["f", "manifest.json"]


def test_a_kill_just_after_publishing_leaves_a_finished_artifact(tmp_path: Path) -> None:
    """The process is killed at each operation in turn. A dry run deletes nothing."""
    at = 0
    target = tmp_path / "corpus"
    user_directories = make_user_directories(tmp_path)
    while not has_survived(Fault(str(tmp_path), at := at + 1), target):
        if not publish.is_done(target, KIND, identity(2), False, dry_run=True):
            publish_file(target, x=2)
        before = names(tmp_path)
        assert publish.is_done(target, KIND, identity(2), False, dry_run=True)
        assert names(tmp_path) == before
        assert publish.is_done(target, KIND, identity(2), False)
        assert names(tmp_path) == sorted(["corpus", *user_directories])
        shutil.rmtree(target)
    assert at > 15


def test_files_of_a_person_in_an_artifact_are_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The process is killed at each operation in turn; in the end nothing of a person is lost."""
    target = tmp_path / "corpus"
    publish_file(target)
    (target / "notes").mkdir()
    (target / "notes/mine.txt").write_text("mine")
    (target / "link").symlink_to("notes")
    with caplog.at_level("INFO"):
        assert not publish.is_done(target, KIND, identity(), overwrite=True, dry_run=True)
    assert "notes/mine.txt" in caplog.text and (target / "notes/mine.txt").is_file()
    at = 0
    while not has_survived(Fault(str(tmp_path), at := at + 1), target):
        assert [*map(Path.read_text, tmp_path.rglob("mine.txt"))] == ["mine"]
    assert (target / "f").read_text() == "new" and not (target / "link").is_symlink()
    assert [*map(Path.read_text, tmp_path.rglob("mine.txt"))] == ["mine"] and at > 15


def test_an_empty_directory_is_a_free_name(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    assert not publish.is_done(tmp_path / "corpus", KIND, identity(), overwrite=False)
    publish_file(tmp_path / "corpus")
    assert (tmp_path / "corpus/f").read_text() == "new"


def test_a_mount_point_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "corpus"
    target.mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == target)
    with pytest.raises(UsageError, match="is a mount point") as caught:
        publish.is_done(target, KIND, identity(), overwrite=False)
    assert f"such as {target}/NAME" in caught.value.render()
    with pytest.raises(UsageError, match="is a mount point"):
        publish_file(target)
    assert names(tmp_path) == ["corpus"]
    with monkeypatch.context() as elsewhere:  # made there, and mounted here
        elsewhere.setattr(os.path, "ismount", lambda path: False)
        publish_file(target)
    assert publish.is_done(target, KIND, identity(), overwrite=False)
    with pytest.raises(UsageError, match="is a mount point"):
        publish.is_done(target, KIND, identity(2), overwrite=True)


def test_differences_are_named_as_typed(tmp_path: Path) -> None:
    target = tmp_path / "corpus"
    publish_file(target)
    changed = {"options": {"num_dirs": 2}, "inputs": {"source": "t"}}
    with pytest.raises(UsageError, match="other inputs or options") as caught:
        publish.is_done(target, KIND, changed, overwrite=False)
    assert caught.value.found.splitlines() == [
        "source: s there, t now",
        "--num-dirs: 1 there, 2 now",
    ]
    assert "--overwrite" in caught.value.run
    for old, new, message in (
        (3e-4 / 10 * 10.1, 1e-4, "0.000303 there, 0.0001 now"),
        (0.0, 1, "0.0 there"),
        (0.1 + 0.2, 0.3000000000000001, "0.30000000000000004 there"),
    ):
        assert message in str(find_differences(old, new)[0])
    with pytest.raises(UsageError) as caught:
        publish.is_done(target, "thing/2", identity(), overwrite=False)
    assert "format: thing/1 there, thing/2 now" in caught.value.found


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("content", ["file", "directory", "other kind", "foreign manifest"])
def test_files_of_others_are_never_replaced(tmp_path: Path, content: str, overwrite: bool) -> None:
    target = tmp_path / "corpus"
    if content == "file":
        target.write_text("mine")
    else:
        target.mkdir()
        (target / "mine").write_text("mine")
    if content == "other kind":
        (target / "manifest.json").write_text(json.dumps({"kind": "model/1", "files": []}))
    if content == "foreign manifest":
        (target / "manifest.json").write_text('{"name": "an app"}')
    with pytest.raises(UsageError, match="not made by"):
        publish.is_done(target, KIND, identity(), overwrite)
    assert (target if content == "file" else target / "mine").read_text() == "mine"


@pytest.mark.parametrize("content", [None, "short", "x" * 100])
def test_an_artifact_that_lost_files_is_not_done(tmp_path: Path, content: str | None) -> None:
    target = tmp_path / "corpus"
    publish_file(target, "as it was made")
    (target / "f").unlink()
    if content is not None:
        (target / "f").write_text(content)
    with pytest.raises(ArtifactError, match="is damaged") as caught:
        publish.is_done(target, KIND, identity(), overwrite=False)
    assert "--overwrite" in caught.value.run
    publish_file(target, overwrite=True)
    assert publish.is_done(target, KIND, identity(), overwrite=False)


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Build(tmp_path / "corpus", KIND, identity(), False) as b:
        (b.dir / "half").write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == []


def test_a_resumable_build_continues_from_finished_files(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError), Build(target, KIND, identity(), False, resumable=True) as build:
        (build.dir / "part").write_text("part")
        raise OSError
    with Build(target, KIND, identity(), False, resumable=True) as build:
        assert (build.dir / "part").read_text() == "part"
        finish_build(build, "rest")
    assert names(tmp_path) == ["model"] and names(target) == ["f", "manifest.json", "part"]


@pytest.mark.parametrize("name", ["content", "content/part"])
def test_a_resumed_build_does_not_write_through_links(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/part").write_text("mine")
    build = Build(tmp_path / "model", KIND, identity(), False, resumable=True)
    build.partial.mkdir()
    partial_dirs.claim_directory(build.partial)
    (build.partial / name).parent.mkdir(exist_ok=True)
    (build.partial / name).symlink_to(tmp_path / "mine" / name.partition("/")[2])
    with build:
        assert build.files() == []
        (build.dir / "part").write_text("ours")
        finish_build(build, "ours")
    assert names(tmp_path / "mine") == ["part"]
    assert (tmp_path / "mine/part").read_text() == "mine"


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ESTALE])
def test_a_builder_whose_files_disappear_uses_what_another_one_built(
    tmp_path: Path, code: int
) -> None:
    target = tmp_path / "corpus"
    with (
        pytest.raises(AlreadyBuilding),
        Build(target, KIND, identity(), False, resumable=True) as build,
    ):
        shutil.rmtree(build.partial)
        raise OSError(code, os.strerror(code))


@pytest.mark.parametrize("name", ["_list_foreign", "is_bare"])
def test_a_partial_directory_that_disappears_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, name: str
) -> None:
    """Its builder has published the artifact while this process looked for leftovers."""
    target = tmp_path / "corpus"
    publish_file(target)
    partial = tmp_path / "corpus.partial-0123abcd"
    partial.mkdir()
    if name == "_list_foreign":
        partial_dirs.claim_directory(partial)
    module = publish if name == "_list_foreign" else partial_dirs

    def vanish(path: Path) -> None:
        shutil.rmtree(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(module, name, vanish)
    assert publish.is_done(target, KIND, identity(), overwrite=False)
    assert not partial.exists() and "deleted" not in capsys.readouterr().out


def test_parts_of_other_options_are_not_resumed(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(OSError), Build(target, KIND, identity(1), False, resumable=True) as build:
        (build.dir / "part").write_text("part")
        raise OSError
    with Build(target, KIND, identity(2), False, resumable=True) as build:
        assert build.files() == [] and names(tmp_path) == [build.partial.name]


@pytest.mark.parametrize("swap", [True, False], ids=["renameat2", "two renames"])
def test_overwrite_keeps_the_old_artifact_until_it_is_replaced(
    tmp_path: Path, monkeypatch, swap: bool
) -> None:
    if not swap:
        monkeypatch.setattr(publish.ctypes, "CDLL", lambda *_, **__: object())
    target = tmp_path / "corpus"
    publish_file(target, "old")
    with pytest.raises(OSError), Build(target, KIND, identity(2), overwrite=True) as build:
        (build.dir / "f").write_text("half")
        raise OSError
    assert (target / "f").read_text() == "old"
    with Build(target, KIND, identity(2), overwrite=True) as build:
        assert (target / "f").read_text() == "old"
        finish_build(build, "new")
    assert (target / "f").read_text() == "new" and names(tmp_path) == ["corpus"]


def test_a_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "big_disk").mkdir()
    (tmp_path / "corpus").symlink_to(tmp_path / "big_disk/corpus")
    publish_file(tmp_path / "corpus", "old")
    publish_file(tmp_path / "corpus", "new", x=2, overwrite=True)
    assert (tmp_path / "corpus").is_symlink()
    assert (tmp_path / "big_disk/corpus/f").read_text() == "new"


def make_user_directories(directory: Path) -> list[str]:
    """Create directories that a user may have beside an artifact; return their names."""
    directories = ["corpus.old-2025", "corpus.partial-12345678", "corpus.partial-keepme"]
    for name in directories:
        publish_file(directory / name, "mine")
    (directory / "corpus.partial-87654321").symlink_to(directory / "corpus.old-2025")
    return [*directories, "corpus.partial-87654321"]


def test_user_directories_named_like_leftovers_stay(tmp_path: Path) -> None:
    user_directories = make_user_directories(tmp_path)
    (tmp_path / "corpus").mkdir()
    for x in range(3):
        publish_file(tmp_path / "corpus", "new", x, overwrite=True)
    corpus = tmp_path / "corpus"
    copied = tmp_path / "corpus.partial-abcdef12"
    with pytest.raises(OSError), Build(corpus, KIND, {}, True, resumable=True) as build:
        (build.dir / "part").write_text("part")
        shutil.copytree(build.partial, copied)
        raise OSError
    publish_file(tmp_path / "corpus", "newer", overwrite=True)
    assert names(tmp_path) == sorted(["corpus", copied.name, *user_directories])
    assert all((tmp_path / name / "f").read_text() == "mine" for name in user_directories)
    shutil.rmtree(copied)
    build.partial.mkdir()
    (build.partial / "mine").write_text("mine")
    with (
        pytest.raises(UsageError, match="is in the way"),
        Build(tmp_path / "corpus", KIND, {}, True),
    ):
        pass
    assert names(build.partial) == ["mine"]


@pytest.mark.parametrize("swap", [True, False], ids=["renameat2", "two renames"])
def test_a_kill_at_any_operation_loses_nothing(tmp_path: Path, monkeypatch, swap: bool) -> None:
    """After each kill the old or the new artifact exists, or the next build restores it."""
    if not swap:
        monkeypatch.setattr(publish.ctypes, "CDLL", lambda *_, **__: object())
    at = 0
    killed = True
    target = tmp_path / "corpus"
    user_directories = make_user_directories(tmp_path)
    while killed:
        at += 1
        publish_file(target, "old", overwrite=True)
        killed = not has_survived(Fault(str(tmp_path), at), target)
        if target.exists():
            assert (target / "f").read_text() in ("old", "new") and names(target)[0] == "f"
        assert target.exists() or not swap
        with Build(target, KIND, identity(3), overwrite=True, resumable=True) as build:
            assert names(build.dir) == [] and (target / "f").read_text() in ("old", "new")
            finish_build(build, "newer")
        assert names(tmp_path) == sorted(["corpus", *user_directories])
        assert (target / "f").read_text() == "newer"
        assert all((tmp_path / name / "f").read_text() == "mine" for name in user_directories)
    assert at > 15


def has_survived(fault: Fault, target: Path) -> bool:
    """Replace an artifact in a child process that meets a fault; return whether it survived."""
    pid = os.fork()
    if not pid:
        fault.install()
        publish_file(target, "new", 2, overwrite=True)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def test_a_second_builder_is_refused_without_harm(tmp_path: Path) -> None:
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
        finish_build(build, "first")
    assert (target / "f").read_text() == "first" and names(tmp_path) == ["corpus"]
    with (
        pytest.raises(AlreadyBuilding, match="just now"),
        Build(target, KIND, identity(), False),
    ):
        pass
    assert names(tmp_path) == ["corpus"]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that lets this process act as another node. Locks are local to a node."""
    monkeypatch.setattr(lease.fcntl, "flock", lambda *_: None)
    return lambda name: monkeypatch.setattr(platform, "node", lambda: name)


@pytest.mark.parametrize("first", ["a", "b"])
def test_two_nodes_with_local_locks_make_one_artifact(tmp_path: Path, node, first: str) -> None:
    """Each builds in a directory of its own, and the first one to finish publishes."""
    target = tmp_path / "corpus"
    node("a")
    with (
        pytest.raises(AlreadyBuilding, match="just now"),
        Build(target, KIND, identity(), False, resumable=True) as one,
    ):
        (one.dir / "g").write_text("of a")
        node("b")
        with Build(target, KIND, identity(), False, resumable=True) as other:
            assert other.files() == [] and one.files() == [one.dir / "g"]
            finish_build(other if first == "b" else one, first)
            finish_build(one if first == "b" else other, "late")
    assert names(target) == (
        ["f", "manifest.json"] if first == "b" else ["f", "g", "manifest.json"]
    )
    assert (target / "f").read_text() == first
    assert publish.is_done(target, KIND, identity(), False) and names(tmp_path) == ["corpus"]


@pytest.mark.parametrize("days", [1, 8])
def test_leftovers_of_another_node_are_deleted_after_a_week(
    tmp_path: Path, node, days: int, caplog: pytest.LogCaptureFixture
) -> None:
    """They are deleted at once if an artifact with the same options is published."""
    target = tmp_path / "corpus"
    caplog.set_level("INFO", logger="pipeline")
    for x in (1, 2):
        node("a")
        killed = Build(target, KIND, identity(x), False)
        killed.partial.mkdir()
        mark = partial_dirs.mark_path(killed.partial)
        manifest.write_json(mark, {"host": "a", "pid": 7})
        os.utime(mark, (time.time() - days * 86400,) * 2)
        killed.dir.mkdir()
    node("b")
    publish_file(target)
    assert names(tmp_path) == ["corpus", *([killed.partial.name] if days == 1 else [])]
    assert ("process 7 on a" in caplog.text) == (days == 1)


def test_another_node_continues_a_build_only_if_it_ended_by_itself(tmp_path: Path, node) -> None:
    """A killed one may still be running, for all that another node knows."""
    target = tmp_path / "corpus"
    node("a")
    with pytest.raises(OSError), Build(target, KIND, identity(), False, resumable=True) as build:
        (build.dir / "part").write_text("of a")
        raise OSError
    node("b")
    killed = Build(target, KIND, identity(), False, resumable=True).__enter__()
    assert (killed.dir / "part").read_text() == "of a"
    node("c")
    with Build(target, KIND, identity(), False, resumable=True) as build:
        assert build.files() == []
    node("b")
    with Build(target, KIND, identity(), False, resumable=True) as build:
        assert build.files() == [killed.dir / "part"]
    assert names(build.partial)[-1] == "content"
