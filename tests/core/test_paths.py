# covers: lib/core/paths.py
"""Find the experiment that a name or a path means."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from lib.core import paths
from lib.core.errors import UsageError


@pytest.mark.parametrize(
    ("text", "save_dir", "root"),
    [
        ("exp", None, "outputs/exp"),
        ("exp/", None, "outputs/exp"),
        ("exp", "results", "results/exp"),
        ("outputs/exp", None, "outputs/exp"),
        ("outputs/exp/", None, "outputs/exp"),
        ("outputs/exp", "outputs", "outputs/exp"),
        ("outputs/exp", "./outputs/", "outputs/exp"),
        ("../there/exp", None, "../there/exp"),
        ("/data/exp", "/data", "/data/exp"),
        ("./exp", None, "exp"),
    ],
)
def test_names_are_in_outputs_and_paths_stay_as_typed(
    text: str, save_dir: str | None, root: str
) -> None:
    opts = Namespace(experiment_name=text, save_dir=save_dir and Path(save_dir))
    paths.expand_save_dir(opts)
    assert opts.save_dir / opts.experiment_name == Path(root) and opts.experiment_name == "exp"


def test_a_dot_means_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exp" / "logs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "exp")
    assert paths.experiment(".").root == tmp_path / "exp"
    monkeypatch.chdir("logs")
    assert paths.experiment("..").root == tmp_path / "exp"


@pytest.mark.parametrize("text", ["", "/", ".hidden", "outputs/.hidden", "outputs/-x", "a\nb"])
def test_invalid_names_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="name of an experiment"):
        paths.experiment(text)


def test_a_path_that_contradicts_save_dir_is_refused() -> None:
    with pytest.raises(UsageError, match="--save-dir results"):
        paths.experiment("outputs/exp", Path("results"))


def test_readers_also_find_runs_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert paths.existing_experiment("exp").root == tmp_path / "exp"
    assert paths.existing_experiment("none").root == Path("outputs/none")
    (tmp_path / "outputs" / "exp").mkdir(parents=True)
    assert paths.existing_experiment("exp").root == Path("outputs/exp")
    assert paths.existing_experiment("./exp").root == Path("exp")


def test_a_disk_that_is_not_mounted_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables escape spaces, and an entry of fstab may be a bind mount of the same disk."""
    root = tmp_path.resolve()
    table = root / "fstab"
    lines = (
        f"# {root}/comment x y",
        "UUID=1 / ext4",
        f"nas:/b {root}/b\\040ack nfs",
        f"/x {root}/bind none bind",
        f"nas:/o {root}/over nfs",
        "",
        "UUID=2 none swap",
    )
    table.write_text("\n".join(lines))
    mounts = root / "mounts"
    mounts.write_text(f"/dev/a / ext4\n/dev/a {root}/bind ext4\nnas:/i {root}/over/inner nfs\n")
    monkeypatch.setattr(paths, "_PLANNED_MOUNTS", table)
    monkeypatch.setattr(paths, "_MOUNTS", mounts)
    (root / "link").symlink_to(root / "b ack" / "runs")
    assert paths.find_missing_mount(root / "b ack") == root / "b ack"
    assert paths.find_missing_mount(root / "link" / "run") == root / "b ack"
    assert paths.find_missing_mount(root / "over") == root / "over"
    for name in ("bind/x", "over/inner/x", "comment/x", "elsewhere", "b ack2", "b"):
        assert paths.find_missing_mount(root / name) is None
    for missing in (mounts, table):
        missing.unlink()
        assert paths.find_missing_mount(root / "b ack") is None
