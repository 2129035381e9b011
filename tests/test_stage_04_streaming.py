# covers: 04_train_fsdp.py, lib/hub/dataset.py, lib/tokens/raw_stream.py
# covers: lib/train/sources/raw_stream.py
"""Run `--streaming` as a user does: raw shards and a Hub on this machine, kills and resumes."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.conftest import run_stage, start_stage
from tests.hub_server import HubServer, Repo
from tests.training import SEQ_LENGTH, assert_refused, losses, metrics, wait_for_save

STEPS = 30
COMMON = (
    "-m",
    "model",
    "-s",
    SEQ_LENGTH,
    "--precision",
    "fp32",
    "--lr",
    "1e-2",
    "--streaming",
    "--log-freq",
    1,
    "--ckpt-freq",
    6,
    "--num-workers",
    2,
    "-b",
    2,
    "--grad-accum-steps",
    3,
)
TRAIN = ("-d", "shards", *COMMON, "--max-steps", STEPS)
EXACT = ("step", "epoch", "train/loss", "train/grad_norm", "train/tokens_seen")


def documents(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(("kan", "lo", "mita", "ru", "sevi"), k=draw.randint(3, 40)))
        for _ in range(count)
    ]


def lines(texts: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"url": "x", field: text}).encode() + b"\n" for text in texts)


def write_shards(root: Path) -> None:
    """Write shards of three formats, less data than a run reads."""
    (root / "more").mkdir(parents=True)
    (root / "a.jsonl").write_bytes(lines(documents(20, 0)) + b"{broken\n{broken too\n")
    (root / "b.jsonl.gz").write_bytes(gzip.compress(lines(documents(20, 1))))
    pq.write_table(pa.table({"text": documents(20, 2)}), root / "more/c.parquet", row_group_size=6)
    (root / "more/d.json").write_bytes(lines(documents(20, 3)))


def has_same_rows(root: Path, one: str, other: str) -> bool:
    rows = [
        [{key: row[key] for key in EXACT} for row in metrics(root, name)] for name in (one, other)
    ]
    return rows[0] == rows[1]


def list_workers(directory: Path) -> list[str]:
    """Return the worker processes that run in a directory."""
    workers = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "cwd").readlink() == directory and b"spawn_main" in (
                entry / "cmdline"
            ).read_bytes():
                workers.append(entry.name)
        except OSError:
            pass  # it has just ended
    return workers


@pytest.fixture
def project(prepared_once: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared_once / "model", tmp_path / "model")
    write_shards(tmp_path / "shards")
    (tmp_path / "outputs").mkdir()
    return tmp_path


@pytest.fixture(scope="module")
def streamed(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a project with shards and the experiment `whole`: 30 steps on two ranks."""
    root = tmp_path_factory.mktemp("streamed")
    shutil.copytree(prepared_once / "model", root / "model")
    write_shards(root / "shards")
    done = run_stage("04_train_fsdp.py", "-e", "whole", *TRAIN, cwd=root, ranks=2)
    (root / "whole.log").write_text(done.stdout)
    return root


@pytest.mark.slow
def test_two_ranks_learn_and_the_log_shows_the_source(streamed: Path):
    measured = losses(streamed, "whole")
    assert len(measured) == STEPS and measured[STEPS] < measured[1] - 0.5
    log = (streamed / "outputs/whole/logs/rank_00000.log").read_text()
    assert "1 worker process per rank" in log and "none with --streaming" in log
    other = (streamed / "outputs/whole/logs/rank_00001.log").read_text()
    assert re.search(r"2 × .* not JSON .*a.jsonl at \d", log + other)
    row = metrics(streamed, "whole")[-1]
    assert 0 < row["perf/loader_share"] < 1 and row["perf/loader_tokens_per_sec_per_device"] > 0
    assert row["train/tokens_seen"] == STEPS * 2 * 2 * 3 * SEQ_LENGTH
    state = json.loads((streamed / "outputs/whole/state.json").read_text())
    assert state["epoch"] == row["epoch"] > 0 and state["samples"] is None
    assert state["global_step"] == STEPS
    state = json.loads(
        (streamed / "outputs/whole/checkpoints/step_00000030/train_state.json").read_text()
    )
    cursors = state["cursors"]
    assert [set(cursor) for cursor in cursors] == [{"epoch", "piece", "place", "token"}] * 2
    assert min(cursor["epoch"] for cursor in cursors) > 0
    assert not list_workers(streamed)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(streamed: Path, tmp_path: Path):
    project = shutil.copytree(streamed, tmp_path, dirs_exist_ok=True)
    launch = start_stage("04_train_fsdp.py", "-e", "cut", *TRAIN, cwd=project, ranks=2)
    wait_for_save(launch, project, "cut")
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in list_workers(project.resolve())]
    assert len(maps) == 2 and not [text for text in maps if "libtorch" in text]
    launch.kill()
    deadline = time.monotonic() + 20
    while list_workers(project.resolve()):
        assert time.monotonic() < deadline, "worker processes outlive their rank"
        time.sleep(0.1)
    assert not list(project.glob(f"outputs/cut/checkpoints/*{STEPS}/COMMIT.json"))
    done = run_stage("04_train_fsdp.py", "-e", "cut", *TRAIN, cwd=project, ranks=2)
    assert "resumed from" in done.stdout and has_same_rows(project, "cut", "whole")
    again = run_stage("04_train_fsdp.py", "-e", "cut", *TRAIN, cwd=project, expect=2)
    assert "ranks: 2 there, 1 now" in again.stderr
    (project / "shards/more/d.json").write_bytes(lines(documents(20, 4)))
    again = run_stage(
        "04_train_fsdp.py", "-e", "cut", *TRAIN, cwd=project, expect=2, env={"WORLD_SIZE": "2"}
    )
    assert "dataset: " in again.stderr and "ranks" not in again.stderr


def test_options_that_contradict_streaming_are_refused(project: Path):
    run = ("-m", "model", "-s", SEQ_LENGTH)
    streaming = (*run, "-d", "shards", "--streaming")
    assert_refused(project, "-e", "x", *streaming, code=2, says="needs --max-steps")
    assert_refused(
        project,
        "-e",
        "x",
        *streaming,
        "--max-steps",
        2,
        "--packing",
        "documents",
        "-d",
        "b=0.5",
        "--prepare-only",
        "--num-epochs",
        1,
        code=2,
        says="4 problems",
    )
    assert_refused(
        project,
        "-e",
        "x",
        *run,
        "-d",
        "shards",
        "--online",
        code=2,
        says="--online belongs to --streaming",
    )
    once = (*streaming, "body", "--max-steps", 2)
    assert_refused(project, "-e", "x", *once, code=2, says="fields are url, text")
    (project / "empty").mkdir()
    assert_refused(
        project,
        "-e",
        "x",
        *run,
        "-d",
        "empty",
        "--streaming",
        "--max-steps",
        2,
        code=2,
        says="no shard",
    )
    assert_refused(
        project,
        "-e",
        "x",
        *run,
        "-d",
        "none",
        "--streaming",
        "--max-steps",
        2,
        code=3,
        says="none does not exist",
    )
    (project / "empty/a.jsonl.gz").write_bytes(b"not compressed at all")
    assert_refused(
        project,
        "-e",
        "x",
        *run,
        "-d",
        "empty",
        "--streaming",
        "--max-steps",
        2,
        code=3,
        says="no readable document",
    )
    assert not list((project / "outputs").iterdir())


def test_a_dry_run_writes_nothing(project: Path):
    for name in ("notes.txt", "more/table.csv"):
        (project / "shards" / name).write_text("of another kind")
    before = sorted(project.rglob("*"))
    done = run_stage("04_train_fsdp.py", "-e", "x", *TRAIN, "--dry-run", cwd=project)
    assert "4 of the 6 files" in done.stdout
    assert "more/table.csv, notes.txt" in done.stdout
    assert "4 files" in done.stdout and "pieces" in done.stdout
    assert sorted(project.rglob("*")) == before


@pytest.fixture
def repo(hub: HubServer) -> Repo:
    """Serve a dataset with the layout of C4."""
    hub.repos["org/text"] = Repo(
        {
            **{
                f"en/train.{i}.json.gz": gzip.compress(lines(documents(40, i)), mtime=0)
                for i in range(5)
            },
            "README.md": b"# Text\n",
        },
        kind="dataset",
    )
    return hub.repos["org/text"]


@pytest.mark.slow
def test_a_dataset_on_the_hub_is_streamed(repo: Repo, hub: HubServer, project: Path):
    arguments = (
        "-d",
        "org/text/en/*.json.gz",
        "--online",
        *COMMON,
        "--max-steps",
        9,
    )
    run_stage("04_train_fsdp.py", "-e", "whole", *arguments, cwd=project, ranks=2)
    assert not hub.paths("README.md")
    assert all("/datasets/org/text" in request.path for request in hub.requests)
    downloaded = project / ".cache/streaming/org--text/en"
    assert all(
        path.read_bytes() == repo.files[f"en/{path.name}"] for path in downloaded.glob("train.*.gz")
    )
    shutil.copytree(project / "outputs/whole", project / "outputs/cut")
    shutil.rmtree(project / "outputs/cut/checkpoints/step_00000009")
    began_with = repo.commit
    repo.commit = "89abcdef0123456789abcdef0123456789abcdef"
    assert_refused(
        project, "-e", "x", *arguments, "-e", "cut", code=2, says=f"has no revision '{began_with}'"
    )
    repo.commit = began_with
    hub.requests.clear()
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "cut",
        *arguments,
        cwd=project,
        ranks=2,
        env={"HF_HUB_OFFLINE": "1"},
    )
    assert has_same_rows(project, "cut", "whole")
    assert all(
        "/resolve/" not in request.path for request in hub.requests
    )  # all files are in the cache


def test_without_online_no_request_is_sent_to_the_hub(repo: Repo, hub: HubServer, project: Path):
    assert_refused(
        project,
        "-e",
        "x",
        "-d",
        "org/text",
        *COMMON,
        "--max-steps",
        2,
        code=3,
        says="does not exist",
    )
    assert not hub.requests
    assert_refused(
        project,
        "-e",
        "x",
        "-d",
        "org/none",
        "--online",
        *COMMON,
        "--max-steps",
        2,
        code=2,
        says="no dataset org/none",
    )
    done = run_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "org/text/*.md",
        "--online",
        *COMMON,
        "--max-steps",
        2,
        cwd=project,
        expect=2,
    )
    assert "no shard in org/text" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_dead_worker_ends_the_run_without_a_traceback(project: Path):
    launch = start_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "shards",
        *COMMON,
        "--max-steps",
        5000,
        cwd=project,
        output=project / "printed",
    )
    wait_for_save(launch, project, "x")
    workers = list_workers(project.resolve())
    assert len(workers) == 2
    os.kill(int(workers[0]), 9)
    codes = launch.wait(60)
    printed = (project / "printed").read_text()
    assert codes == [1] and "has died (signal 9)" in printed and "Traceback" not in printed
