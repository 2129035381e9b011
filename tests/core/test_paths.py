"""Which experiment a name or a path means."""

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
def test_a_name_lies_in_outputs_and_a_path_is_itself(
    text: str, save_dir: str | None, root: str
) -> None:
    opts = Namespace(experiment_name=text, save_dir=save_dir and Path(save_dir))
    paths.expand_save_dir(opts)
    assert opts.save_dir / opts.experiment_name == Path(root) and opts.experiment_name == "exp"


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ({"checkpoint_dir": "ckpt"}, "ckpt"),
        ({"checkpoint_dir": "/fsx/ckpt/"}, "/fsx/ckpt"),
        ({"checkpoint_dir": "ckpt", "experiment_name": "exp"}, "ckpt/exp"),
        ({"checkpoint_dir": "a/b", "experiment_name": "a/b/exp"}, "a/b/exp"),
    ],
)
def test_a_directory_of_checkpoints_is_that_of_the_run_or_of_all_runs(
    given: dict[str, str], root: str
) -> None:
    opts = Namespace(
        save_dir=None,
        experiment_name=given.get("experiment_name"),
        checkpoint_dir=Path(given["checkpoint_dir"]),
    )
    paths.expand_save_dir(opts)
    assert opts.save_dir / opts.experiment_name == Path(root) and opts.checkpoint_dir is None


def test_two_places_for_the_same_are_refused() -> None:
    with pytest.raises(UsageError, match="give --save-dir or --checkpoint-dir, not both"):
        paths.expand_save_dir(
            Namespace(save_dir=Path("a"), checkpoint_dir=Path("b"), experiment_name="x")
        )


def test_the_directory_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "exp" / "logs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "exp")
    assert paths.experiment(".").root == tmp_path / "exp"
    monkeypatch.chdir("logs")
    assert paths.experiment("..").root == tmp_path / "exp"


@pytest.mark.parametrize("text", ["", "/", ".hidden", "outputs/.hidden", "outputs/-x", "a\nb"])
def test_what_is_no_name(text: str) -> None:
    with pytest.raises(UsageError, match="is not a name of an experiment"):
        paths.experiment(text)


def test_a_path_that_save_dir_contradicts() -> None:
    with pytest.raises(UsageError, match="outputs/exp does not lie in --save-dir results"):
        paths.experiment("outputs/exp", Path("results"))


def test_who_reads_finds_a_run_beside_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exp").mkdir()
    monkeypatch.chdir(tmp_path)
    assert paths.existing_experiment("exp").root == tmp_path / "exp"
    assert paths.existing_experiment("none").root == Path("outputs/none")
    (tmp_path / "outputs" / "exp").mkdir(parents=True)
    assert paths.existing_experiment("exp").root == Path("outputs/exp")
    assert paths.existing_experiment("./exp").root == Path("exp")
