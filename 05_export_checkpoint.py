#!/usr/bin/env python3
"""Stage 05: turn a checkpoint into a Hugging Face model directory.

  python 05_export_checkpoint.py -e exp
  python 05_export_checkpoint.py -e exp --step best --dtype float32 --out my-model

Reads only outputs/<exp>/, never the network, and holds two tensors in memory at a time.
The result loads with `AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints import card, commit
from lib.core import commands, hashing, log, manifest, options, paths, publish, stage, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.core.progress import Progress

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lib.checkpoints.export import ExportPlan

KIND = "export/1"
_DTYPES = ("bfloat16", "float32", "float16")


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__, "-e NAME [options]")
    parser.add_argument("-e", "--experiment-name", metavar="NAME",
                        help="name of the run, a directory under --save-dir; or the path of "
                             "that directory (needed)")
    parser.add_argument("--save-dir", type=Path, metavar="DIR",
                        help="where experiments lie (default: outputs, or where -e leads)")
    parser.add_argument("--step", default="latest", metavar="N|latest|best",
                        help="which checkpoint; best is the one with the lowest validation loss")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="the model directory to write "
                             "(default: <save-dir>/<experiment>/export/step_…)")
    parser.add_argument("--dtype", type=options.dtype(*_DTYPES), choices=_DTYPES,
                        default="bfloat16", help="dtype of the weights, also as bf16, fp32 or "
                        "fp16; training keeps them in float32")
    parser.add_argument("--max-shard-size", type=options.positive_size, default="5GB",
                        metavar="SIZE",
                        help="bytes per safetensors file at most, for example 5GB or 512MiB")
    parser.add_argument("--trust-remote-code", action="store_true",
                        help="run the code that came with the model, where its type needs that; "
                             "taken from the command line alone")
    parser.add_common()
    opts = parser.parse(argv)
    paths.settle(opts)
    return opts


def main(argv: list[str]) -> None:
    """Find the checkpoint, plan the files, write them, read them back, publish."""
    opts = parse(argv)
    if not opts.experiment_name:
        raise UsageError("-e is needed: the experiment to export",
                         found=list_experiments(opts.save_dir))
    experiment = Experiment(opts.save_dir, opts.experiment_name)
    checkpoint = find_checkpoint(opts, experiment)
    out = opts.out or experiment.exports / paths.step_name(checkpoint.step)
    identity = {"options": {"dtype": opts.dtype, "max_shard_size": opts.max_shard_size},
                "inputs": {"step": checkpoint.step, "checkpoint": checkpoint.commit()["manifest"]}}
    if publish.is_done(out, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(f"already done: {out} holds step {checkpoint.step:,}\n{next_command(out)}")
        return
    require_model_files(experiment, checkpoint)
    damage = None if opts.dry_run else begin_hashing(checkpoint)

    import torch

    from lib.checkpoints import export
    from lib.models import architecture

    model = architecture.build_on_meta(experiment.model, trust_code=opts.trust_remote_code)
    plan = export.plan(model, getattr(torch, opts.dtype), opts.max_shard_size)
    log.info(f"export of {checkpoint.path}")
    log.table({"model": f"{model.config.model_type}, {units.count(model.num_parameters())} "
                        "parameters",
               "to": f"{out}, {opts.dtype}, {units.size(plan.bytes)} in "
                     f"{units.counted(len(plan.files), 'file')}"})
    if damage is None:
        return
    require_intact(checkpoint, damage.result())
    write(opts, experiment, checkpoint, model, plan, out, identity)


def write(opts: Options, experiment: Experiment, checkpoint: commit.Checkpoint,
          model: PreTrainedModel, plan: ExportPlan, out: Path, identity: dict[str, Any]) -> None:
    """Write the files, read them back, publish, and say how it went."""
    from lib.checkpoints import export
    from lib.models import adapters

    began = time.monotonic()
    asked = adapters.asked_by(checkpoint.commit().get("identity", {}).get("options", {}))
    publish.require_space(out.parent, int(plan.bytes * 1.01), "the exported model")
    with publish.Build(out, KIND, identity, opts.overwrite) as build:
        files = write_model_files(opts, experiment, checkpoint, model, build)
        with Progress("exporting", plan.bytes, "B", not opts.no_progress) as bar:
            try:
                weights = export.write(model, checkpoint, plan, build.dir, bar.advance,
                                       adapters.make(asked))
            except FileNotFoundError:
                require_there(checkpoint)
                raise
        export.verify(model, build.dir)
        require_same(checkpoint, identity["inputs"]["checkpoint"])
        require_model_files(experiment, checkpoint)
        build.publish(stage="05_export_checkpoint.py", options=options.resolved(opts),
                      files=files + weights,
                      summary={"step": checkpoint.step, "dtype": opts.dtype, "bytes": plan.bytes,
                               "tensors": len(plan.entries)})
    seconds = time.monotonic() - began
    log.info(f"done: {units.counted(len(plan.entries), 'tensor')}, {units.size(plan.bytes)}, "
             f"written and read "
             f"back in {units.duration(seconds)} ({units.size(plan.bytes / seconds)}/s)\n"
             + next_command(out))


def find_checkpoint(opts: Options, experiment: Experiment) -> commit.Checkpoint:
    """Return the checkpoint that --step names; UsageError or ArtifactError when there is none.

    A damaged one is never passed over in silence for an older one.
    """
    if not (experiment.model / "config.json").is_file():
        raise ArtifactError(f"no experiment {experiment.root}",
                            found=list_experiments(opts.save_dir))
    if opts.step not in ("latest", "best") and not opts.step.isdecimal():
        raise UsageError(f"--step takes a number, latest or best, got {opts.step!r}")
    found = {c.step: c for c in commit.scan(experiment.checkpoints)}  # newest first
    steps = [step for step, c in found.items() if not c.problems()]
    whole = ", ".join(map(str, steps)) or "none"
    if not found:
        raise ArtifactError(f"no valid checkpoint in {experiment.checkpoints}",
                            run=commands.train("--config", experiment.config)
                            if experiment.config.exists() else "")
    if opts.step == "best":
        losses = card.validation_losses(found.values(), experiment.metrics)
        if not losses:
            raise ArtifactError("no checkpoint here was saved right after an evaluation",
                                found=f"steps {whole}", run=commands.as_typed("--step", "latest"))
        chosen = found[min(losses, key=losses.__getitem__)]
    else:
        step = next(iter(found)) if opts.step == "latest" else int(opts.step)
        if step not in found:
            raise ArtifactError(f"no valid checkpoint of step {step}", found=f"steps {whole}")
        chosen = found[step]
    if problems := chosen.problems():
        raise ArtifactError(f"checkpoint {chosen.path} is damaged", found="\n".join(problems),
                            **suggest_older(steps, chosen.step))
    return chosen


def list_experiments(save_dir: Path) -> str:
    """Return in words which experiments there are."""
    names = sorted(path.parent.parent.name for path in save_dir.glob("*/model/config.json"))
    return f"under {save_dir}: {', '.join(names) or 'none'}"


def suggest_older(steps: list[int], step: int) -> dict[str, str]:
    """Return what to do about a damaged checkpoint: the newest whole one before it, if any."""
    before = [other for other in steps if other < step] or [s for s in steps if s != step]
    if not before:
        return {"hint": "no other is whole; stage 04 makes a new one"}
    return {"hint": "the newest whole one instead:", "run": commands.as_typed("--step", before[0])}


def begin_hashing(checkpoint: commit.Checkpoint) -> Future[list[str]]:
    """Start to hash what will be read, beside the imports; the result is what is damaged."""
    def work() -> list[str]:
        parts = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(parts) as pool:
            found = pool.map(lambda i: checkpoint.content_problems(
                i, parts, for_export=True), range(parts))
            return [problem for problems in found for problem in problems]
    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def require_intact(checkpoint: commit.Checkpoint, problems: list[str]) -> None:
    """Raise ArtifactError when hashing found damage; nothing has been unpickled so far."""
    require_there(checkpoint)
    if problems:
        raise ArtifactError(f"checkpoint {checkpoint.path} is damaged", found="\n".join(problems),
                            **suggest_older([c.step for c in commit.scan(checkpoint.path.parent)
                                             if not c.problems()], checkpoint.step))


def require_model_files(experiment: Experiment, checkpoint: commit.Checkpoint) -> None:
    """Raise ArtifactError when config or tokenizer are not those that the run was begun with."""
    try:
        digests = checkpoint.record().get("model_files", {})
    except (OSError, ValueError):
        return  # hashing the checkpoint will tell
    wrong = [name for name, digest in digests.items()
             if not (experiment.model / name).is_file()
             or not hashing.matches(experiment.model / name, digest)]
    if links := [path.name for path in experiment.model.iterdir() if path.is_symlink()]:
        raise ArtifactError(f"{experiment.model} holds links, and what they lead to may be no part "
                            "of the run", found=", ".join(sorted(links)),
                            expected="the files that stage 04 has copied there")
    if wrong:
        raise ArtifactError(f"{experiment.model} is damaged",
                            found=f"missing or changed: {', '.join(wrong)}",
                            hint="copy them again from the model that the run was begun with "
                                 f"(model_dir in {experiment.config})")


def require_there(checkpoint: commit.Checkpoint) -> None:
    """Raise ArtifactError when the checkpoint went away before its files were open."""
    if not checkpoint.path.exists():
        raise ArtifactError(f"{checkpoint.path} was deleted meanwhile: the run that goes on there "
                            "keeps only its newest", run=commands.as_typed())


def require_same(checkpoint: commit.Checkpoint, chosen: str) -> None:
    """Raise ArtifactError when another checkpoint has taken the place of the one that was chosen.

    chosen: the digest of its manifest. One that is gone was read all the same: files stay open.
    """
    try:
        found = checkpoint.commit()["manifest"]
    except FileNotFoundError:
        return
    if found != chosen:
        raise ArtifactError(f"{checkpoint.path} was replaced meanwhile by one of another run; "
                            "nothing was exported", run=commands.as_typed())


def write_model_files(opts: Options, experiment: Experiment, checkpoint: commit.Checkpoint,
                      model: PreTrainedModel, build: publish.Build) -> list[dict[str, Any]]:
    """Write configs (with the dtype of the export), tokenizer and model card; return their entries.
    """
    from transformers import GenerationConfig

    from lib.models import remote_code
    from lib.models.architecture import read_config, read_content
    from lib.models.directory import CODE_DIGESTS
    from lib.models.tokenizer import CHAT_TEMPLATE
    from lib.train import journal

    out, config = build.dir, read_content(experiment.model)
    for path in sorted(experiment.model.iterdir()):
        if path.is_file() and path.suffix not in (".tmp", ".py") and \
                path.name not in ("config.json", CODE_DIGESTS):
            shutil.copyfile(path, out / path.name)
    if opts.trust_remote_code and remote_code.is_needed(config):
        remote_code.carry(experiment.model, out)
    else:
        config.pop("auto_map", None)  # names code that is not here and was not used
    config |= {"architectures": [type(model).__name__], "dtype": opts.dtype}
    if "torch_dtype" in config:  # the name of the same field before transformers 5
        config["torch_dtype"] = opts.dtype
    manifest.write_json(out / "config.json", config)
    if not (out / "generation_config.json").exists() and model.can_generate():
        GenerationConfig.from_model_config(
            read_config(experiment.model, opts.trust_remote_code)).save_pretrained(out)
    names = journal.read_config(experiment).get("options", {})
    facts = card.facts(checkpoint, experiment.metrics, names)
    manifest.write_text(out / card.FILE, card.text(
        experiment.root.name, type(model).__name__, opts.dtype, model.num_parameters(), facts,
        chats=(out / CHAT_TEMPLATE).exists()))
    return [manifest.file_entry(out, path, "sha256") for path in build.files()]


def next_command(out: Path) -> str:
    """Return what to type next."""
    return f"next: AutoModelForCausalLM.from_pretrained({str(out)!r}), or train on with " \
           "stage 04 from it, as " + commands.shell("-m", out)


if __name__ == "__main__":
    stage.run(main)
