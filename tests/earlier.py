"""Artifacts as an earlier version made them, which every later one opens and goes on from.

  python -m tests.earlier        makes tests/earlier.tar.xz anew; only when a format is given up

Kept are a corpus of stages 01 and 02, a model, the token stores and packs, two runs that stand at
step 4 of 6, an export of one, and `losses.json`: of both runs' six steps, by experiment.
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
_COMMON = (
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
# Experiment → ranks and options but for --max-steps.
RUNS = {
    "windows": (2, (*_COMMON, "-e", "windows", "-s", 64, "-b", 2)),
    "documents": (
        1,
        (
            *_COMMON,
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
BEFORE = {
    "01_organize_data.py": ("--num-dirs", 2),
    "02_build_hf_dataset.py": ("--validation-percent", 15),
}
EXPORT = ("-e", "windows", "--step", 4, "--dtype", "float32")


def main() -> None:
    """Make all of it in a temporary project, and pack it."""
    from transformers import LlamaConfig

    from tests.training import VOCABULARY, losses, save_model, save_tokenizer, write_corpus

    with tempfile.TemporaryDirectory() as directory:
        project = Path(directory) / "project"
        write_corpus(project / "raw_text", documents=12)
        for path in (project / "raw_text").iterdir():
            os.utime(path, (1.7e9, 1.7e9))  # archives keep no nanoseconds
        for script, options in BEFORE.items():
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
        found = {}
        for name, (ranks, options) in RUNS.items():
            run_stage(
                "04_train_fsdp.py", *options, "--max-steps", 4, cwd=project, ranks=ranks, fresh=True
            )
            shutil.copytree(project / "outputs" / name, project / "kept" / name)
            run_stage(
                "04_train_fsdp.py", *options, "--max-steps", 6, cwd=project, ranks=ranks, fresh=True
            )
            found[name] = losses(project, name)
        shutil.rmtree(project / "outputs")
        (project / "kept").rename(project / "outputs")
        run_stage("05_export_checkpoint.py", *EXPORT, "--out", "export", cwd=project, fresh=True)
        (project / "losses.json").write_text(json.dumps(found))
        for run in (project / "outputs").iterdir():
            for left_out in ("logs", "tb"):
                shutil.rmtree(run / left_out)
            (run / "loss.png").unlink(missing_ok=True)
            config = (run / "config.yaml").read_text().replace(f"{ROOT}/", "")
            (run / "config.yaml").write_text(config)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(project, arcname=".")


if __name__ == "__main__":
    main()
