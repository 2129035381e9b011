# covers: lib/train/sampling.py, lib/runs/metrics.py
"""samples.jsonl after resumes, rollbacks and failing disks, and the end of a sample's text."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed as dist
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lib.core.append_only import AppendOnlyFile
from lib.core.paths import Experiment
from lib.parallel import generation
from lib.runs.metrics import Metrics
from lib.tokens.prompts import Prompt
from lib.train.sampling import (
    PromptSample,
    SampleFile,
    Sampling,
    describe_sample,
    format_texts,
)

SAMPLE = PromptSample(0, "a\x1b[2J\n# b", "greedy", "<b>\u202e</b>\nc\x07", 3, False)


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    run = Experiment(tmp_path, "exp")
    run.root.mkdir()
    return run


def steps_of(experiment: Experiment) -> list[int]:
    return [json.loads(line)["step"] for line in experiment.samples.read_text().splitlines()]


def test_samples_of_repeated_steps_are_dropped(experiment: Experiment) -> None:
    file = SampleFile(experiment, 0, is_kept=True)
    for step in (2, 4, 6):
        file.write(step, 100 * step, [SAMPLE])
    file.rewind(4)  # a rollback
    assert steps_of(experiment) == [2, 4]
    file.write(6, 600, [SAMPLE])
    file.close()
    with experiment.samples.open("a") as raw:
        raw.write('{"step": 8, "to')
    SampleFile(experiment, 2, is_kept=False)  # another rank changes nothing
    resumed = SampleFile(experiment, 2, is_kept=True)
    resumed.write(4, 400, [SAMPLE])
    assert steps_of(experiment) == [2, 4]
    assert experiment.samples.read_bytes().isascii()
    row = json.loads(experiment.samples.read_text().splitlines()[0])
    assert row == {"step": 2, "tokens_seen": 200, **SAMPLE._asdict()}


def test_a_full_disk_keeps_samples_for_later(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SampleFile(experiment, 0, is_kept=True)

    def fail(_: AppendOnlyFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(AppendOnlyFile, "_append", fail)  # where a write reaches the disk
        for step in (1, 2, 3):
            file.write(step, step, [SAMPLE])
        file.rewind(2)
    file.write(4, 4, [SAMPLE])
    assert steps_of(experiment) == [1, 2, 4]


def test_texts_for_people_show_control_characters(experiment: Experiment) -> None:
    assert describe_sample(SAMPLE) == '"a\\x1b[2J\\n# b" → "<b>\\x202e</b>\\nc\\x07"'
    assert len(describe_sample(SAMPLE._replace(text="x" * 1000))) < 150
    texts = format_texts([SAMPLE])
    lines = ["a\\x1b[2J", "# b", "→", "<b>\\x202e</b>", "c\\x07"]
    assert texts == {"samples/prompt_0/greedy": "\n".join(f"    {line}" for line in lines)}
    metrics = Metrics(experiment, 0, 0)
    metrics.write_samples(3, texts, [])
    metrics.write({"step": 3, "train/loss": 1.0})
    metrics.close()
    events = EventAccumulator(str(experiment.tensorboard)).Reload()
    [event] = events.Tensors("samples/prompt_0/greedy")
    assert event.step == 3 and event.tensor_proto.string_val[0].decode() == next(
        iter(texts.values())
    )
    assert events.Scalars("train/loss")[0].value == 1.0


def test_a_text_ends_before_eos_or_a_token_that_ends_answers(
    monkeypatch: pytest.MonkeyPatch, group: dist.ProcessGroup
) -> None:
    """A stand-in continues the prompts, so that these tokens come at known places."""
    continuations = np.array([[5, 6, 2, 7], [5, 9, 6, 6], [5, 6, 7, 8]])
    monkeypatch.setattr(generation, "continue_prompts", lambda *_: (continuations, continuations))
    sampling = Sampling(
        SimpleNamespace(prompts=[Prompt(f"{index}", [3]) for index in range(3)], stops=[9]),
        Path(),
        SimpleNamespace(
            config=SimpleNamespace(seed=0, seq_length=32, packing="concat"),
            is_evaluated=lambda step: step == 7,
        ),
        SimpleNamespace(rank=0, control=group),
    )
    # A tokenizer would be loaded from the directory of a model.
    sampling.__dict__["_tokenizer"] = SimpleNamespace(
        eos_token_id=2, decode=lambda ids, **_: "".join(f"{token}," for token in ids)
    )
    samples = sampling.make_samples(None)
    greedy = [sample for sample in samples if sample.kind == "greedy"]
    assert [(s.text, s.tokens, s.ended) for s in greedy] == [
        ("5,6,", 2, True),
        ("5,", 1, True),
        ("5,6,7,8,", 4, False),
    ]
    assert [step for step in range(1, 8) if sampling.is_due(step)] == [7]
