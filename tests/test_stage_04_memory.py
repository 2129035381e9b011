# covers: 04_train_fsdp.py, lib/train/memory_fit.py, lib/planning/knobs.py
"""Run stage 04 in a control group with little memory."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from transformers import LlamaConfig

from tests import forks
from tests.conftest import run_stage, stage_command
from tests.control_group import limit_memory
from tests.training import VOCABULARY, read_log, save_model, save_tokenizer

TRAIN = ("-d", "corpus", "--max-steps", 1, "--precision", "fp32")


def train_within(size: int, project: Path, *arguments: object) -> subprocess.CompletedProcess:
    """Train with so many bytes of memory; the libraries alone take 0.3 to 0.5 GB."""
    with limit_memory(size) as join:
        return subprocess.run(
            [*join, *stage_command("04_train_fsdp.py", *TRAIN, *arguments)],
            cwd=project,
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, **forks.CPU_VARIABLES},
        )


LARGE = (
    *("-e", "large", "--from-scratch", "--model-size", "350M", "--tokenizer", "model"),
    *("-s", 64),
)


@pytest.mark.slow
def test_a_model_that_is_too_large_is_refused_before_it_allocates_memory(project: Path) -> None:
    done = train_within(1_500_000_000, project, *LARGE)
    assert done.returncode == 2, done.stdout + done.stderr
    needs, has = map(
        float,
        re.search(
            r"error: this run does not fit: a rank needs ([\d.]+) GiB "
            r"and can have ([\d.]+) [MG]iB of host memory",
            done.stderr,
        ).groups(),
    )
    assert 4 < needs < 5 and has
    assert re.search(r"hint: +it fits on \d+ ranks", done.stderr)
    assert re.search(r"no option makes .* [\d.]+M parameters", done.stderr)
    assert not (project / ".cache/tokens").exists() and not (project / "outputs").exists()


@pytest.mark.long
def test_the_kernel_kills_a_model_that_is_too_large(project: Path) -> None:
    started = train_within(1_500_000_000, project, *LARGE, "--plan-only-warn")
    assert started.returncode == -9 and "does not fit: a rank needs" in started.stdout
    assert "log: outputs/large" in started.stdout


@pytest.mark.slow
def test_activations_are_recomputed_if_the_step_fits_only_then(project: Path) -> None:
    """Without recomputation this run takes 1.4 GiB, more than it is given."""
    save_tokenizer(project / "wide", project / "raw_text")
    save_model(
        project / "wide",
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
        ),
    )
    wide = ("-m", "wide", "-s", 512, "-b", 8)
    done = train_within(1_350_000_000, project, "-e", "auto", *wide)
    assert done.returncode == 0, done.stdout + done.stderr
    log = read_log(project, "auto")
    assert "--activation-checkpointing auto: selective" in log
    assert "--activation-checkpointing selective (memory estimate)" in log
    resumed = run_stage(
        "04_train_fsdp.py", "-e", "auto", *TRAIN[:3], 2, *TRAIN[4:], *wide, "--dry-run", cwd=project
    )
    assert "--activation-checkpointing selective (earlier launch)" in resumed.stdout
