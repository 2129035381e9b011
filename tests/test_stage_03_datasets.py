# covers: 03_download_model.py, lib/hub/raw_text.py
"""Raw files of a dataset, from a local Hub server to the corpus of stages 01 and 02."""

from __future__ import annotations

import gzip
import json
import random
import shlex
from pathlib import Path

import pytest

from lib.hub import raw_text
from tests.conftest import StageRunner
from tests.hub_models import SCRIPT, TOKEN, find_files_with
from tests.hub_server import HubServer, Repo

NAME = "org/text"
WHERE = Path("raw_text/org--text")
FILES = [f"en/train.0000{i}-of-00003.json.gz" for i in range(3)]


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    """Serve a dataset as C4 is: compressed JSON Lines in directories, and files beside them."""
    draw = random.Random(0)
    files = {
        path: gzip.compress(
            b"".join(
                json.dumps({"text": f"{path} {i} {draw.random()}", "url": "x"}).encode() + b"\n"
                for i in range(2000)
            ),
            mtime=0,
        )
        for path in FILES
    }
    hub.repos[NAME] = Repo(
        {
            **files,
            "README.md": b"# Text\n",
            ".gitattributes": b"* text\n",
            "de/train.json.gz": b"not wanted",
        },
        kind="dataset",
    )
    return hub.repos[NAME]


def fetch_dataset(stage: StageRunner, *more: object, **settings: object):
    return stage(SCRIPT, "--dataset-name", NAME, "--include", "en/*.json.gz", *more, **settings)


def files_of(where: Path) -> dict[str, bytes]:
    return {
        path.relative_to(where).as_posix(): path.read_bytes()
        for path in where.rglob("*")
        if path.is_file() and "/.hub" not in path.as_posix()
    }


def test_from_the_hub_to_a_dataset(repo, hub, stage: StageRunner, tmp_path):
    repo.cut[FILES[1]] = 5000
    done = fetch_dataset(stage)
    assert files_of(tmp_path / WHERE) == {path: repo.files[path] for path in FILES}
    assert "01_organize_data.py --src-dir raw_text" in done.stdout
    record = json.loads((tmp_path / WHERE / ".hub/manifest.json").read_text())
    assert record["summary"]["commit"] == repo.commit and record["kind"] == "raw/1"
    assert [
        (tmp_path / WHERE / ".hub" / entry["path"]).resolve().is_file() for entry in record["files"]
    ] == [True] * 3
    hub.requests.clear()
    assert "already done" in fetch_dataset(stage).stdout and not hub.requests
    stage("01_organize_data.py", "--num-dirs", 2)
    listed = [json.loads(line) for line in (tmp_path / "splits/files.jsonl").open()]
    assert {entry["path"]: entry.get("skipped") for entry in listed} == {
        **{f"org--text/{path}": None for path in FILES},
        "org--text/.hub/": "hidden",
    }
    built = stage("02_build_hf_dataset.py", "--save-dir", "hf_datasets/text", "--fields", "text")
    assert "6,000" in built.stdout


def test_more_files_reuse_those_that_are_there(repo, hub, stage: StageRunner, tmp_path):
    printed = stage(
        SCRIPT,
        "--dataset-name",
        NAME,
        "--include",
        FILES[0],
        "--include",
        "README.md",
        "--include",
        "en/*.jsn.gz",
    ).stdout
    assert "--include en/*.jsn.gz matches none" in printed
    hub.requests.clear()
    more = fetch_dataset(stage).stdout  # adds to what is there
    assert "with earlier files" in more and ".hub" not in more
    assert files_of(tmp_path / WHERE) == {path: repo.files[path] for path in [*FILES, "README.md"]}
    assert not hub.paths(FILES[0]) and hub.paths(FILES[1])
    hub.requests.clear()
    assert "already done: raw_text/org--text (" in fetch_dataset(stage).stdout and not hub.requests
    assert (
        "--revision: main there, v2 now"
        in fetch_dataset(stage, "--revision", "v2", expect=2).stderr
    )
    printed = fetch_dataset(stage, "--overwrite").stdout  # only the files of --include
    assert "will delete 1 file" in printed
    assert files_of(tmp_path / WHERE) == {path: repo.files[path] for path in FILES}
    assert {path.name for path in (tmp_path / "raw_text").iterdir()} == {"org--text"}
    output = stage(SCRIPT, "--verify", "--dst-root", "raw_text").stdout
    assert "1 artifact" in output and "intact   raw_text/org--text\n" in output
    (tmp_path / WHERE / FILES[2]).unlink()
    printed = stage(SCRIPT, "--verify", "--dst-root", "raw_text", expect=3).stderr
    assert f"raw_text/org--text/{FILES[2]} is missing" in printed
    assert "of 1: raw_text/org--text\n" in printed
    assert f"--dataset-name {NAME} --include 'en/*.json.gz' --overwrite" in printed
    assert f"raw_text/org--text/{FILES[2]} is missing" in fetch_dataset(stage, expect=3).stderr


def test_a_same_size_corruption_is_never_put_in_place(repo, stage: StageRunner, tmp_path):
    content = bytearray(repo.files[FILES[1]])
    content[-9] ^= 1
    repo.served[FILES[1]] = bytes(content)
    assert "is damaged" in fetch_dataset(stage, expect=3).stderr
    assert files_of(tmp_path / WHERE) == {} and not (tmp_path / WHERE / ".hub").exists()


@pytest.mark.parametrize("path", ["../evil.json.gz", "en/../../evil.json.gz", "/tmp/evil.json.gz"])
def test_a_path_that_leads_out_is_refused(repo, stage: StageRunner, tmp_path, path):
    repo.files[path] = b"evil"
    done = stage(SCRIPT, "--dataset-name", NAME, "--include", "*", expect=2)
    assert "unsafe paths" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("evil*"))


def test_files_of_others_are_not_overwritten(repo, stage: StageRunner, tmp_path):
    mine = tmp_path / WHERE / FILES[0]
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    assert "would overwrite" in fetch_dataset(stage, expect=2).stderr
    assert mine.read_text() == "mine"
    mine.unlink()
    mine.parent.rmdir()
    mine.parent.write_text("mine")  # a file where a directory has to be
    printed = fetch_dataset(stage, "--include", "README.md", expect=2).stderr
    assert "would overwrite" in printed and "en\n" in printed
    assert files_of(tmp_path / WHERE) == {"en": b"mine"}
    mine.parent.unlink()
    mine.parent.mkdir()
    mine.write_bytes(repo.files[FILES[0]])  # as a run that was killed at its end leaves it
    fetch_dataset(stage)
    assert files_of(tmp_path / WHERE) == {path: repo.files[path] for path in FILES}


def test_what_cannot_be_had_is_told(repo, stage: StageRunner, tmp_path):
    nothing = stage(SCRIPT, "--dataset-name", NAME, "--include", "fr/*", expect=2).stderr
    assert "fr/*" in nothing
    assert (
        "no dataset org/none"
        in stage(SCRIPT, "--dataset-name", "org/none", "--include", "*", expect=2).stderr
    )
    assert "needs --include" in stage(SCRIPT, "--dataset-name", NAME, expect=2).stderr
    printed = stage(
        SCRIPT, "--dataset-name", "../x", "--model-size", "1B", "--allow-pickle", expect=2
    ).stderr
    assert "4 problems" in printed and "--allow-pickle is an option" in printed
    repo.sizes[FILES[0]] = 10**15
    assert "not enough room" in fetch_dataset(stage, expect=4).stderr
    repo.gated = True
    repo.token = TOKEN
    del repo.sizes[FILES[0]]
    gated = fetch_dataset(stage, expect=2).stderr
    assert "is gated" in gated and "/datasets/org/text" in gated
    fetch_dataset(stage, env={"HF_TOKEN": TOKEN})
    assert not find_files_with(tmp_path, TOKEN)


def test_files_that_cannot_all_be_moved_stay_together(tmp_path):
    (tmp_path / "new/en").mkdir(parents=True)
    for path in ("a", "en/b"):
        (tmp_path / "new" / path).write_text(path)
    (tmp_path / "en").write_text("mine")
    with pytest.raises(OSError):
        raw_text.move_into_place(
            tmp_path / "new", tmp_path / ".hub", [{"path": "a"}, {"path": "en/b"}]
        )
    assert (tmp_path / "new/a").read_text() == "a" and not (tmp_path / "a").exists()


def test_what_stage_04_tells_to_type_for_a_name_of_the_hub(
    repo: Repo, stage: StageRunner, tmp_path: Path
) -> None:
    """Fetched and built as it says, the dataset is found under the name that was typed."""
    train = ("04_train_fsdp.py", "-e", "x", "-d", NAME, "-m", NAME)

    def type_command(script: str, kind: str) -> None:
        printed = stage(*train, expect=3).stderr
        assert "2 problems" in printed and f"{SCRIPT} --model-name {NAME}" in printed
        line = next(line for line in printed.splitlines() if f"{script} {kind}" in line)
        words = shlex.split(line.replace("run:", ""))
        stage(script, *words[words.index(kind) :], "--no-progress")

    type_command(SCRIPT, "--dataset-name")
    assert [*files_of(tmp_path / WHERE)] == ["README.md"]  # and not terabytes, unseen
    fetch_dataset(stage)
    type_command("02_build_hf_dataset.py", "--data-folder")
    assert "2 problems" not in (again := stage(*train, expect=3).stderr)
    assert "no finished model" in again


def test_pointers_and_splits_of_a_repository_are_named(hub, stage: StageRunner, tmp_path):
    line = b'{"text": "x"}\n'
    hub.repos[NAME] = Repo(
        {
            "data/train.jsonl": line,
            "data/test.jsonl": line,
            "data/extra.parquet": b"version https://git-lfs.github.com/spec/v1\noid sha256:"
            + b"4d" * 32
            + b"\nsize 73400320\n",
            "README.md": b"<h1>Text</h1>",
        },
        kind="dataset",
    )
    done = stage(SCRIPT, "--dataset-name", NAME, "--include", "*")
    assert "1 file without data" in done.stdout and "data/extra.parquet is a Git" in done.stdout
    organized = stage("01_organize_data.py", "--num-dirs", 1).stdout
    assert "named as  test: 1 file (org--text/data/test.jsonl)" in organized
    built = stage("02_build_hf_dataset.py", "--data-folder", "splits")
    assert "1 train row" in built.stdout and "git lfs pull" in built.stdout
