"""What follows a save holds up no step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import commit, state
from lib.checkpoints.save import Snapshot
from lib.core.paths import Experiment
from lib.train.journal import Journal
from lib.train.saving import Saves


def test_all_that_follows_a_save_is_done_in_its_thread(
        tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting, noting and drawing; a run that begins the next save waits for it, and no step does.
    """
    experiment, seen = Experiment(tmp_path, "exp"), []
    prune, opts = commit.prune, SimpleNamespace(ckpt_keep=2, ckpt_keep_every=None, ckpt_async=True)

    def slowly(*rules: object) -> list[int]:
        time.sleep(0.2)
        seen.append(threading.current_thread().name)
        return prune(*rules)

    monkeypatch.setattr(commit, "prune", slowly)
    longest = 0.0
    saves = Saves(opts, experiment, Journal(experiment, 0), group, None)
    for step in range(1, 5):
        saves.finish(wait=True)
        saves.begin(Snapshot(step, {"model.x": torch.zeros(3)}, state.random_states(
            torch.device("cpu")), {"step": step}, {}), after=lambda: seen.append("after"))
        while len(seen) < 2 * step - 1:
            began = time.monotonic()
            saves.finish(wait=False)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.001)
    saves.finish(wait=True)
    assert [name.rpartition("_")[0] or name for name in seen] == ["saving", "after"] * 4
    assert [c.step for c in commit.scan(experiment.checkpoints)] == [4, 3] and longest < 0.1
    events = [json.loads(line) for line in experiment.events.open()]
    assert [(e["event"], e.get("steps")) for e in events] == [
        ("save", None), ("save", None), ("save", None), ("prune", [1]), ("save", None),
        ("prune", [2])]
