# covers: lib/checkpoints/commit.py, lib/checkpoints/checkpointer.py
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
from lib.core.paths import Experiment
from lib.runs.events import EventFile


def test_work_after_a_save_runs_in_the_saving_thread(
    tmp_path: Path, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pruning, recording events and `after` make only the next save wait, never a step."""
    experiment = Experiment(tmp_path, "exp")
    seen = []
    prune = commit.prune_checkpoints
    layout = SimpleNamespace(rank=0, device=torch.device("cpu"), control=group, saving=group)

    def slowly(*rules: object) -> list[int]:
        time.sleep(0.2)
        seen.append(threading.current_thread().name)
        return prune(*rules)

    monkeypatch.setattr(commit, "prune_checkpoints", slowly)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([weight])
    longest = 0.0
    checkpointer = Checkpointer(
        experiment.checkpoints,
        layout,
        {},
        total_steps=9,
        every=1,
        keep=2,
        free_memory=lambda: 1e9,
        note=EventFile(experiment).add_event,
    )
    for step in range(1, 5):
        state = SimpleNamespace(
            step=step,
            optimizer=optimizer,
            tensors=lambda: {"model.x": weight},
            state_dict=lambda step=step: {"step": step},
        )
        checkpointer.save(state, after=lambda is_shared: seen.append("after" if is_shared else ""))
        while len(seen) < 2 * step - 1:
            began = time.monotonic()
            checkpointer.poll(state)
            longest = max(longest, time.monotonic() - began)
            time.sleep(0.001)
    checkpointer.finish(wait=True)
    assert [name.rpartition("_")[0] or name for name in seen] == ["saving", "after"] * 4
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
