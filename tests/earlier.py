"""Artifacts of an earlier version, which all later versions must open and continue from.

  python -m tests.earlier        makes tests/earlier.tar.xz again; only if support for a format ends

The archive contains a corpus of stages 01 and 02, a model, the token stores and packs, two runs at
step 4 of 6, an export of one, and `losses.json` with the losses of all six steps of both runs.
"""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from pathlib import Path

from tests.conftest import ROOT, run_stage

ARCHIVE = Path(__file__).with_suffix(".tar.xz")
_COMMON_OPTIONS = (
    "-d",
    "corpus",
    "-m",
    "model",
    "--precision",
    "fp32",
    "--lr",
    "1e-2",
    "--log-freq",
    1,
    "--lr-scheduler",
    "constant",
    "--warmup-steps",
    0,
    "--ckpt-freq",
    4,
)
# Experiment → ranks, and options without --max-steps.
RUNS = {
    "windows": (2, (*_COMMON_OPTIONS, "-e", "windows", "-s", 64, "-b", 2)),
    "documents": (
        1,
        (
            *_COMMON_OPTIONS,
            "-e",
            "documents",
            "-s",
            80,
            "-b",
            2,
            "--packing",
            "documents",
            "--optimizer",
            "adamw8bit",
        ),
    ),
}
DATA_STAGES = {
    "01_organize_data.py": ("--num-dirs", 2),
    "02_build_hf_dataset.py": ("--validation-percent", 15),
}
EXPORT_OPTIONS = ("-e", "windows", "--step", 4, "--dtype", "float32")


def main() -> None:
    """Make the artifacts in a temporary project, and pack the archive."""
    from transformers import LlamaConfig

    from tests.training import VOCABULARY, losses, save_model, save_tokenizer, write_corpus

    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "project"
        write_corpus(project / "raw_text", documents=12)
        for path in (project / "raw_text").iterdir():
            os.utime(path, (1.7e9, 1.7e9))  # archives keep no nanoseconds
        for script, options in DATA_STAGES.items():
            run_stage(script, *options, cwd=project, fresh=True)
        save_tokenizer(project / "model", project / "raw_text")
        save_model(
            project / "model",
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=1,
                max_position_embeddings=128,
            ),
        )
        losses_of = {}
        for name, (ranks, options) in RUNS.items():
            run_stage(
                "04_train_fsdp.py", *options, "--max-steps", 4, cwd=project, ranks=ranks, fresh=True
            )
            shutil.copytree(project / "outputs" / name, project / "kept" / name)
            run_stage(
                "04_train_fsdp.py", *options, "--max-steps", 6, cwd=project, ranks=ranks, fresh=True
            )
            losses_of[name] = losses(project, name)
        shutil.rmtree(project / "outputs")
        (project / "kept").rename(project / "outputs")
        run_stage(
            "05_export_checkpoint.py", *EXPORT_OPTIONS, "--out", "export", cwd=project, fresh=True
        )
        (project / "losses.json").write_text(json.dumps(losses_of))
        for run in (project / "outputs").iterdir():
            for unneeded in ("logs", "tb"):
                shutil.rmtree(run / unneeded)
            (run / "loss.png").unlink(missing_ok=True)
            config = (run / "config.yaml").read_text().replace(f"{ROOT}/", "")
            (run / "config.yaml").write_text(config)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(project, arcname=".")


if __name__ == "__main__":
    main()
