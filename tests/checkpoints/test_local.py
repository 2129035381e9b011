# covers: lib/checkpoints/commit.py, lib/checkpoints/snapshot.py, lib/checkpoints/tier.py
"""The tier on a node's own disk records deletions and keeps unreadable checkpoints."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.snapshot import Snapshot, get_random_states
from lib.checkpoints.tier import LocalTier
from lib.core import hashing, manifest, reading


def test_deletions_are_recorded_and_unreadable_checkpoints_are_kept(
    tmp_path: Path,
    group: dist.ProcessGroup,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recorded: list[tuple] = []
    leftover = commit.create_attempt(tmp_path, 9).name
    tier = LocalTier(
        tmp_path,
        group,
        group,
        lambda event, step, **facts: recorded.append(
            (event, step, facts.get("steps") or facts.get("paths"))
        ),
    )
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

    reasons: list[str] = []
    monkeypatch.setattr(reading, "_PAUSES_S", ())
    for module, name in ((manifest, "find_damage"), (hashing, "has_digest")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, fail)
            assert (
                tier.find_usable({"options": {}}, 0, lambda step, why: reasons.append(why)) is None
            )
    reasons += [text for text in caplog.messages if "stays where it is" in text]
    assert len(reasons) == 4 and all("does not mean that it is damaged" in why for why in reasons)
    usable = tier.find_usable({"options": {}}, 0, lambda step, why: reasons.append(why))
    assert usable is not None and usable.step == 3 and not commit.list_quarantined(tmp_path)
    tier.delete_all(3)
    assert recorded[-1] == ("prune", 3, [3, 2]) and not tmp_path.exists()
