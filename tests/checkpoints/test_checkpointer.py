# covers: lib/checkpoints/commit.py, lib/checkpoints/checkpointer.py
# covers: lib/checkpoints/run_directory.py, lib/checkpoints/place.py
"""Work after a save does not delay a step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from lib.checkpoints import commit
from lib.checkpoints.checkpointer import Checkpointer
from lib.checkpoints.place import SavedRun
from lib.checkpoints.run_directory import RunDirectory
from lib.core.paths import Experiment
from lib.runs.events import EventFile


def test_work_after_a_save_runs_in_the_saving_thread(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning, events and whoever follows a save make only the next save wait, never a step."""
    experiment = Experiment(tmp_path, "exp")
    seen = []
    prune = commit.prune_checkpoints
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"), control=group, saving=group)

    def slowly(*rules: object) -> list[int]:
        time.sleep(0.2)
        seen.append(threading.current_thread().name)
        return prune(*rules)

    def follow(_: object) -> None:
        time.sleep(0.2)
        seen.append(threading.current_thread().name)

    monkeypatch.setattr(commit, "prune_checkpoints", slowly)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight])
    longest = 0.0
    run = SavedRun("exp", "1", {}, layout, EventFile(experiment).add_event)
    directory = RunDirectory(run, experiment.checkpoints, every=1, keep=2)
    checkpointer = Checkpointer(run, [directory], total_steps=9, free_memory=lambda: 1e9)
    for step in range(1, 5):
        state = SimpleNamespace(
            step=step,
            optimizer=optimizer,
            tensors=lambda: {"model.x": weight},
            state_dict=lambda step=step: {"step": step},
        )
        save = checkpointer.save(state)
        save.add_done_callback(follow)
        while len(seen) < 2 * step - 1:
            began = time.monotonic()
            checkpointer.poll(state)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.001)
    checkpointer.finish(wait=True)
    assert len(seen) == 8, "whoever waits for a save waits for its followers, too"
    assert [name.rpartition("_")[0] for name in seen] == ["saving", "saving"] * 4
    assert [c.step for c in commit.list_checkpoints(experiment.checkpoints)] == [
        4,
        3,
    ] and longest < 0.1
    events = [json.loads(line) for line in experiment.events.open()]
    assert [(e["event"], e.get("steps")) for e in events] == [
        ("save", None),
        ("save", None),
        ("save", None),
        ("prune", [1]),
        ("save", None),
        ("prune", [2]),
    ]
