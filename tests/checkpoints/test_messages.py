# covers: lib/checkpoints/commit.py, lib/checkpoints/contents.py
# covers: lib/checkpoints/checkpointer.py, lib/checkpoints/search.py, lib/checkpoints/snapshot.py
"""The wording of the errors of lib/checkpoints; behaviour tests look for one keyword only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import commit, contents, search, snapshot
from lib.checkpoints.checkpointer import Checkpointer
from lib.checkpoints.place import SavedRun
from lib.checkpoints.run_directory import RunDirectory
from lib.core.errors import ArtifactError, DiskFullError
from tests.checkpoint_harness import commit_checkpoint
from tests.conftest import message_lines


def test_the_error_without_a_valid_checkpoint(tmp_path: Path, group: dist.ProcessGroup) -> None:
    (commit_checkpoint(tmp_path, 5).path / commit.COMMIT).unlink()
    with pytest.raises(ArtifactError) as caught:
        search.find_newest_valid(tmp_path, group, lambda step, why: None)
    assert message_lines(caught.value) == [
        f"error: no valid checkpoint in {tmp_path}",
        "expected: at least one valid checkpoint",
        "found:    step_00000005: COMMIT.json is missing",
        "hint:     inspect checkpoints/quarantine/. To train from the beginning, use another "
        "experiment name or --overwrite",
    ]


def test_the_warning_about_a_quarantined_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = commit.quarantine(
        commit_checkpoint(tmp_path, 5), "COMMIT.json does not match its digest"
    )
    assert caplog.messages == [
        f"step_00000005 was moved to quarantine, {target}: COMMIT.json does not match its digest"
    ]


def test_the_error_for_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit_checkpoint(tmp_path, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    with pytest.raises(DiskFullError) as caught:
        commit.require_space(tmp_path)
    assert message_lines(caught.value)[0] == f"error: no disk space for a checkpoint in {tmp_path}"


def test_the_warning_about_a_skipped_save(caplog: pytest.LogCaptureFixture) -> None:
    run = SavedRun("exp", "1", {}, SimpleNamespace(rank=0))
    checkpointer = Checkpointer(run, [RunDirectory(run, Path("c"), every=1)], total_steps=9)
    checkpointer._step = 6
    full = DiskFullError("no disk space for a checkpoint in c", found="1 kB free")
    checkpointer._handle_failure(full, last=False)
    assert caplog.messages == [
        "step 6 is NOT SAVED: no disk space for a checkpoint in c (1 kB free). Training continues, "
        "and ends with exit code 4 after 3 such saves in a row"
    ]
    with pytest.raises(DiskFullError) as caught:
        checkpointer._handle_failure(full, last=True)
    assert caught.value.hint == (
        "free disk space there, or keep fewer checkpoints with --ckpt-keep. "
        "Kept checkpoints and those in quarantine/ are never deleted to make space"
    )


def test_the_error_for_tensors_of_another_model() -> None:
    with pytest.raises(ArtifactError) as caught:
        snapshot.require_same_specs(
            {"model.a": torch.zeros(2), "model.b": torch.zeros(3)},
            {"model.a": ((4,), torch.float32), "model.c": ((1,), torch.float32)},
            Path("step_00000005"),
        )
    assert message_lines(caught.value) == [
        "error: checkpoint step_00000005 belongs to another model (3 differences)",
        "expected: the model that this experiment was started with",
        "found:    model.a is torch.float32 [4], the model has torch.float32 [2]",
        "model.b is missing",
        "model.c is not in the model",
    ]


def test_the_error_for_a_record_with_missing_or_wrong_fields(tmp_path: Path) -> None:
    record = tmp_path / commit.TRAIN_STATE
    record.write_text(json.dumps({"step": "5"}))
    with pytest.raises(ArtifactError) as caught:
        contents.read_record(record)
    assert message_lines(caught.value) == [
        f"error: {record} was not written by stage 04",
        "found:    values of the wrong type: step",
    ]
    fields = dict.fromkeys(contents._RequiredFields.__annotations__, 0)
    del fields["samples"]
    with pytest.raises(ArtifactError) as caught:
        contents.require_complete(fields, Path("step_00000005"))
    assert message_lines(caught.value) == [
        "error: step_00000005 lacks state that a resumed run needs",
        "found:    missing in train_state.json: samples",
    ]
