# covers: lib/train/inputs.py, lib/train/model_files.py
"""The model of a run without -m: the question to the user, the log, and a resume."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

from lib.core import manifest
from lib.models import lookup
from tests.conftest import run_stage
from tests.training import SEQ_LENGTH, VOCABULARY, read_log, save_model, save_tokenizer

TRAIN = ("-d", "corpus", "-s", SEQ_LENGTH, "--max-steps")


def prepare_as_by_stage_03(project: Path, name: str, **shape: Any) -> Path:
    """Create a model in the cache directory, and return its path."""
    from transformers import LlamaConfig

    path = project / ".cache/models" / name
    save_tokenizer(path, project / "raw_text")
    save_model(
        path,
        LlamaConfig(
            **{
                "vocab_size": VOCABULARY,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                **shape,
            }
        ),
    )
    manifest.write_manifest(
        path,
        kind="model/1",
        stage="",
        identity={},
        options={"model_name": name},
        summary={},
        files=[manifest.file_entry(path, file) for file in path.iterdir()],
    )
    return path


def first_line(project: Path, *arguments: object, **settings: Any) -> str:
    done = run_stage("04_train_fsdp.py", *arguments, cwd=project, **settings)
    return done.stdout.partition("\n")[0].removesuffix(lookup.announce_import()) or done.stderr


def test_a_run_asks_for_logs_and_keeps_its_model(project: Path) -> None:
    small = prepare_as_by_stage_03(project, "org--small")
    larger = prepare_as_by_stage_03(project, "org--larger", hidden_size=64)
    prepare_as_by_stage_03(project, "demo")

    question = first_line(project, "-e", "x", *TRAIN, 1, expect=2)
    assert "2 models are prepared" in question
    commands = re.findall(r".* -m \S+", question)
    lines = [first_line(project, *shlex.split(line)[2:], "--dry-run") for line in commands]
    assert lines == [
        "model: .cache/models/org--larger, 115K parameters",
        "model: .cache/models/org--small, 51.4K parameters",
    ]

    first_line(project, "-e", "x", *TRAIN, 1, "-m", "org/larger")
    model = "experiment outputs/x: .cache/models/org--larger, 115K parameters\n"
    assert model in read_log(project, "x")
    line = "model: .cache/models/org--larger, 115K parameters, with which outputs/x was started"
    assert first_line(project, "-e", "x", *TRAIN, 2, "--dry-run") == line
    assert first_line(project, "-e", "x", *TRAIN, 2, "--dry-run", "--overwrite") == line
    shutil.rmtree(project / "outputs/x/checkpoints")  # as if it had ended before its first save
    assert first_line(project, "-e", "x", *TRAIN, 2, "--dry-run") == line
    larger.rename(project / ".cache/models/moved")  # its content is still there
    assert ".cache/models/moved, 115K parameters" in first_line(
        project, "-e", "x", *TRAIN, 2, "--dry-run"
    )
    (project / ".cache/models/moved").rename(project / "elsewhere")
    gone = first_line(project, "-e", "x", *TRAIN, 2, expect=3)
    assert "org--larger, with which" in gone
    line = first_line(project, "-e", "y", *TRAIN, 2, "--dry-run")
    assert line.startswith(f"model: {small.relative_to(project)}, 51.4K parameters")
