# covers: 04_train_fsdp.py, launch/cloud/checkpoints/hyperpod.py
"""`--ckpt-local-dir hyperpod:URL`: frequent checkpoints in the memory of a HyperPod cluster."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cloud.hyperpod_service import run_service
from tests.conftest import free_port, run_stage, start_stage
from tests.training import SMALL_RUN, list_saved_steps, losses, read_events

pytest.importorskip("amzn_sagemaker_checkpointing", reason="needs amzn-sagemaker-checkpointing")
from amzn_sagemaker_checkpointing.config.in_memory_client import InMemoryClientConfig
from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import (
    InMemoryCheckpointClient,
)

STEPS = 40
RANKS = 2
COMMON = (
    *SMALL_RUN,
    "-b",
    2,
    "--lr",
    "1e-2",
    "--eval-freq",
    0,
    "--ckpt-freq",
    20,
    "--max-steps",
    STEPS,
)
Slots = dict[tuple[int, int], bytes]  # by rank and step


def save_in_memory(address: str) -> tuple[object, ...]:
    """Return the options of the run, which saves in the cluster's memory every 2 steps."""
    return (*COMMON, "-e", "run", "--ckpt-local-dir", f"hyperpod:{address}")


def steps_in_memory(project: Path) -> list[int]:
    """Return the steps that the run has saved in the cluster's memory."""
    return [
        row["step"] for row in read_events(project, "save") if row["path"].startswith("hyperpod/")
    ]


def client_of(project: Path, address: str) -> InMemoryCheckpointClient:
    """Return a client of the run's namespace."""
    run = yaml.safe_load((project / "outputs/run/config.yaml").read_text())["run"]
    return InMemoryCheckpointClient(
        f"run-{run}", "0", str(RANKS), InMemoryClientConfig(base_url=address), steps_retained=2
    )


@pytest.fixture(scope="module")
def once(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Slots]:
    """Return a project with an undisturbed run and a killed one, and the content of the service."""
    root = tmp_path_factory.mktemp("hyperpod")
    shutil.copytree(prepared_once, root, dirs_exist_ok=True)
    run_stage("04_train_fsdp.py", *COMMON, "-e", "plain", cwd=root, ranks=RANKS)
    with run_service() as address:
        launch = start_stage(
            "04_train_fsdp.py",
            *save_in_memory(address),
            cwd=root,
            ranks=RANKS,
            output=root / "printed",
        )
        while max([0, *steps_in_memory(root)]) <= 22:
            assert not launch.poll(), (root / "printed").read_text()
            time.sleep(0.01)
        launch.kill()
        client = client_of(root, address)
        slots = {
            (rank, step): client.get_checkpoint(step, rank=rank)
            for step in client.get_latest_checkpoints()
            for rank in range(RANKS + 1)
        }
    return root, {slot: content for slot, content in slots.items() if content is not None}


@pytest.fixture
def slots(once: tuple[Path, Slots]) -> Slots:
    """Return the checkpoints that the killed run has left in the service."""
    return dict(once[1])


@pytest.fixture
def run(once: tuple[Path, Slots], tmp_path: Path) -> Path:
    """Return a copy of the project with the killed run."""
    shutil.copytree(once[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.fixture
def address() -> Iterator[str]:
    """Return the address of an empty service."""
    with run_service() as url:
        yield url


def fill_service(project: Path, address: str, slots: Slots) -> InMemoryCheckpointClient:
    """Put the checkpoints of the killed run into the service."""
    client = client_of(project, address)
    client.get_or_create_namespace()
    for (rank, step), content in sorted(slots.items(), key=lambda item: item[0][1]):
        client.put_checkpoint(step, content, rank=rank)
    return client


def find_newest_committed(slots: Slots) -> int:
    return max(step for rank, step in slots if rank == RANKS)  # the slot of COMMIT


def resumed_from(project: Path) -> tuple[str, int]:
    """Return the place and the step of the checkpoint of the last resume."""
    event = read_events(project, "resume")[-1]
    return event["path"].partition("/")[0], event["step"]


@pytest.mark.slow
def test_a_killed_run_resumes_from_memory_with_the_same_losses(
    run: Path, slots: Slots, address: str
) -> None:
    client = fill_service(run, address, slots)
    printed = run_stage("04_train_fsdp.py", *save_in_memory(address), cwd=run, ranks=RANKS).stdout
    assert resumed_from(run) == ("hyperpod", find_newest_committed(slots))
    assert "resumed from hyperpod/run-" in printed
    assert losses(run, "run") == losses(run, "plain")
    assert list_saved_steps(run, "run") == [20, STEPS]
    assert max(steps_in_memory(run)) == STEPS - 2
    assert client.get_namespace_config() == {}, "a complete run does not need them any more"


@pytest.mark.long
def test_the_shared_checkpoint_is_used_if_a_rank_cannot_read_its_part(
    run: Path, slots: Slots, address: str
) -> None:
    for step in {step for _, step in slots}:
        part = slots.get((1, step), b"")
        slots[1, step] = part[:-1] + b"\xa5"
    fill_service(run, address, slots)
    printed = run_stage("04_train_fsdp.py", *save_in_memory(address), cwd=run, ranks=RANKS).stdout
    assert resumed_from(run) == ("outputs", 20)
    assert "rank 1's part does not" in printed
    assert "cluster's memory" in read_events(run, "quarantine")[-1]["reason"]
    assert losses(run, "run") == losses(run, "plain")


@pytest.mark.long
def test_another_number_of_ranks_uses_the_shared_checkpoint(
    run: Path, slots: Slots, address: str
) -> None:
    fill_service(run, address, slots)
    run_stage("04_train_fsdp.py", *save_in_memory(address), "-b", 4, cwd=run)
    assert resumed_from(run) == ("outputs", 20)
    assert max(steps_in_memory(run)) == STEPS - 2


@pytest.mark.long
def test_an_unreachable_service_does_not_end_a_run(run: Path) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    printed = run_stage("04_train_fsdp.py", *save_in_memory(gone), cwd=run, ranks=RANKS).stdout
    assert "memory cannot be used" in printed
    assert "step 22 is not saved" in printed
    assert resumed_from(run) == ("outputs", 20)
    assert losses(run, "run") == losses(run, "plain")
    assert list_saved_steps(run, "run") == [20, STEPS]


def test_options_that_contradict_hyperpod_are_refused(project: Path) -> None:
    bad = (*COMMON, "-e", "run", "--dry-run", "--ckpt-local-dir")
    for place in ("hyperpod:cluster:9200", "hyperpod:http://user:word@cluster"):
        done = run_stage("04_train_fsdp.py", *bad, place, cwd=project, expect=2)
        assert "contains no address" in done.stderr
