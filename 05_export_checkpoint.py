#!/usr/bin/env python3
"""Stage 05: turn a checkpoint into a Hugging Face model directory.

  python 05_export_checkpoint.py -e exp
  python 05_export_checkpoint.py -e exp --step best --dtype float32 --out my-model

Reads only outputs/<exp>/, never the network, and holds one layer's tensors in memory at a time.
The result loads with `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints import commit
from lib.core import log, manifest, options, paths, publish, stage, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.core.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = "export/1"


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__)
    parser.add_argument("-e", "--experiment-name", metavar="NAME",
                        help="directory of the run under --save-dir")
    parser.add_argument("--save-dir", type=Path, default=Path("outputs"), metavar="DIR",
                        help="where experiments lie")
    parser.add_argument("--step", default="latest", metavar="N|latest|best",
                        help="which checkpoint; best is the one with the lowest validation loss")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="the model directory to write "
                             "(default: <save-dir>/<experiment>/export/step_…)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16",
                        help="dtype of the weights; training keeps them in float32")
    parser.add_argument("--max-shard-size", type=options.positive_size, default="5GB",
                        metavar="SIZE",
                        help="bytes per safetensors file at most, for example 5GB or 512MiB")
    parser.add_common(workers="are not used here: the disk is what limits an export")
    return parser.parse(argv)


def main(argv: list[str]) -> None:
    """Find the checkpoint, plan the files, write them, read them back, publish."""
    opts = parse(argv)
    if not opts.experiment_name:
        raise UsageError("-e is needed: the experiment to export",
                         run="python 05_export_checkpoint.py -e exp")
    if not paths.is_name(opts.experiment_name):
        raise UsageError(f"-e {opts.experiment_name!r} is no name of an experiment")
    experiment = Experiment(opts.save_dir, opts.experiment_name)
    checkpoint = find_checkpoint(opts, experiment)
    out = opts.out or experiment.exports / paths.step_name(checkpoint.step)
    identity = {"options": {"dtype": opts.dtype, "max_shard_size": opts.max_shard_size},
                "inputs": {"step": checkpoint.step, "checkpoint": checkpoint.commit()["manifest"]}}
    if publish.is_done(out, KIND, identity, opts.overwrite):
        log.info(f"already done: {out} holds step {checkpoint.step:,}\n{next_command(out)}")
        return

    import torch

    from lib.checkpoints import export
    from lib.models import architecture

    model = architecture.build_on_meta(experiment.model)
    dtype = getattr(torch, opts.dtype)
    shards = export.plan(model, dtype, opts.max_shard_size)
    total = sum(entry.bytes for shard in shards for entry in shard)
    log.info(f"export of {checkpoint.path}")
    log.table({"model": f"{model.config.model_type}, "
                        f"{units.count(sum(p.numel() for p in model.parameters()))} parameters",
               "to": f"{out}, {opts.dtype}, {units.size(total)} in {len(shards)} file(s)"})
    if opts.dry_run:
        return
    began = time.monotonic()
    require_intact(checkpoint)
    publish.require_space(out.parent, int(total * 1.01), "the exported model")
    with publish.Build(out, KIND, identity, opts.overwrite) as build:
        files = copy_model_files(experiment, build.dir, model, opts.dtype)
        with Progress("exporting", total, "B", not opts.no_progress) as bar:
            weights = export.write(model, checkpoint, shards, build.dir, dtype, bar.advance)
        export.verify(model, build.dir, weights)
        build.publish(stage="05_export_checkpoint.py", options=options.resolved(opts),
                      files=files + weights,
                      summary={"step": checkpoint.step, "dtype": opts.dtype, "bytes": total,
                               "tensors": sum(map(len, shards))})
    seconds = time.monotonic() - began
    log.info(f"done: {sum(map(len, shards)):,} tensors, {units.size(total)}, written and read back "
             f"in {units.duration(seconds)} ({units.size(total / seconds)}/s)\n{next_command(out)}")


def find_checkpoint(opts: Options, experiment: Experiment) -> commit.Checkpoint:
    """Return the checkpoint that --step names; UsageError or ArtifactError when there is none."""
    if not (experiment.model / "config.json").is_file():
        there = sorted(p.parent.parent.name for p in opts.save_dir.glob("*/model/config.json"))
        raise ArtifactError(f"no experiment {experiment.root}",
                            found=f"under {opts.save_dir}: {', '.join(there) or 'none'}",
                            run=f"torchrun 04_train_fsdp.py -e {opts.experiment_name} -d <dataset>")
    found = commit.scan(experiment.checkpoints)
    whole = [c for c in found if not c.problems()]
    for bad in (c for c in found if c not in whole):
        log.warn(f"{bad.path} is damaged and left out: {bad.problems()[0]}")
    listing = ", ".join(str(c.step) for c in whole) or "none"
    if not whole:
        raise ArtifactError(f"no valid checkpoint in {experiment.checkpoints}",
                            run=f"torchrun 04_train_fsdp.py -e {opts.experiment_name} -d <dataset>")
    if opts.step == "latest":
        return whole[0]
    if opts.step == "best":
        losses = {c: c.commit().get("eval_loss") for c in whole}
        measured = {c: loss for c, loss in losses.items() if loss is not None}
        if not measured:
            raise ArtifactError("no checkpoint here was saved right after an evaluation",
                                found=f"steps {listing}", run="--step latest, or a step")
        return min(measured, key=measured.__getitem__)
    if not opts.step.isdigit():
        raise UsageError(f"--step takes a number, latest or best, got {opts.step!r}")
    named = next((c for c in whole if c.step == int(opts.step)), None)
    if named is None:
        raise ArtifactError(f"no valid checkpoint of step {opts.step}", found=f"steps {listing}")
    return named


def require_intact(checkpoint: commit.Checkpoint) -> None:
    """Hash the whole checkpoint before any of it is unpickled; ArtifactError when it differs."""
    if not checkpoint.path.exists():
        raise ArtifactError(f"{checkpoint.path} was deleted meanwhile: the run that goes on there "
                            "keeps only its newest", run="the same command again")
    if problems := checkpoint.content_problems(0, 1):
        raise ArtifactError(f"checkpoint {checkpoint.path} is damaged", found="\n".join(problems),
                            run="choose an older one with --step")


def copy_model_files(experiment: Experiment, out: Path, model: PreTrainedModel, dtype: str,
                     ) -> list[dict[str, Any]]:
    """Write config (with the dtype of the export) and tokenizer; return their manifest entries."""
    for path in sorted(experiment.model.iterdir()):
        if path.is_file() and path.name != "config.json":
            shutil.copyfile(path, out / path.name)
    config = json.loads((experiment.model / "config.json").read_text(encoding="utf-8"))
    config.pop("auto_map", None)  # names code that is not here and was not used
    config |= {"architectures": [type(model).__name__], "dtype": dtype}
    if "torch_dtype" in config:  # the name of the same field before transformers 5
        config["torch_dtype"] = dtype
    manifest.write_json(out / "config.json", config)
    return [manifest.file_entry(out, path, "sha256") for path in sorted(out.iterdir())]


def next_command(out: Path) -> str:
    """Return what to type next."""
    return f"next: AutoModelForCausalLM.from_pretrained({str(out)!r}), or train on with " \
           f"torchrun 04_train_fsdp.py -e <new name> -d <dataset> -m {out}"


if __name__ == "__main__":
    stage.run(main)
