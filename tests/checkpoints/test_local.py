# covers: lib/checkpoints/commit.py, lib/checkpoints/snapshot.py, lib/checkpoints/tier.py
"""The tier on a node's own disk records deletions and keeps unreadable checkpoints."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.place import SavedRun
from lib.checkpoints.snapshot import Snapshot, get_random_states
from lib.checkpoints.tier import LocalTier
from lib.core import hashing, manifest, reading
from lib.runs.events import Event


def test_deletions_are_recorded_and_unreadable_checkpoints_are_kept(
    tmp_path: Path,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded: list[tuple] = []
    reasons: list[str] = []
    directory = tmp_path / "exp-1"
    leftover = commit.create_attempt(directory, 9).name

    def note(event: str, step: int, **facts: object) -> None:
        if event == Event.QUARANTINE:
            reasons.append(str(facts["reason"]))
        else:
            recorded.append((event, step, facts.get("steps") or facts.get("paths")))

    cpu = torch.device("cpu")
    layout = SimpleNamespace(rank=0, ranks=1, device=cpu, control=group, saving=group)
    run = SavedRun("exp", "1", {"options": {}}, layout, note)
    tier = LocalTier(run, str(tmp_path), every=1)
    for step in (1, 2, 3):
        tier.write(
            Snapshot(
                step,
                {"model.x": torch.full((3,), step)},
                get_random_states(torch.device("cpu")),
                {"step": step},
                {"options": {}},
            )
        )
    assert recorded == [("clean", 0, [leftover]), ("prune", 3, [1])]

    def fail(*arguments: object, **options: object) -> str:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(reading, "_PAUSES_S", ())
    for module, name in ((manifest, "find_damage"), (hashing, "has_digest")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            assert tier.find_newest() is None
    reasons += [text for text in caplog.messages if "stays where it is" in text]
    assert len(reasons) == 4 and all("does not mean" in why for why in reasons)
    usable = tier.find_newest()
    assert usable is not None and usable.step == 3 and not commit.list_quarantined(directory)
    tier.clear(3)
    assert recorded[-1] == ("prune", 3, [3, 2]) and not directory.exists()
