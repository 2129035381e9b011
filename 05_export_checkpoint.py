#!/usr/bin/env python3
"""Stage 05: turn a checkpoint into a Hugging Face model directory.

  python 05_export_checkpoint.py -e exp
  python 05_export_checkpoint.py -e exp --step best --dtype float32 --out my-model
  python 05_export_checkpoint.py -e exp --adapter    # LoRA adapters alone, as PEFT writes them

Reads only outputs/<exp>/, and of a run with adapters the model that they were trained beside; never
the network. Holds two tensors in memory at a time. The result loads with
`AutoModelForCausalLM.from_pretrained`.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints import commit
from lib.core import commands, log, manifest, options, paths, publish, stage, units
from lib.core.errors import ArtifactError, UsageError
from lib.core.options import Options
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.export import card, companions

if TYPE_CHECKING:
    from lib.export.base_model import BaseModel
    from lib.export.formats import Export

KIND = "export/1"
_DTYPES = ("bfloat16", "float32", "float16")


def parse(argv: list[str]) -> Options:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__, "-e NAME [options]")
    parser.add_argument(
        "-e",
        "--experiment-name",
        metavar="NAME",
        help="name of the run, a directory under --save-dir; or the path of "
        "that directory (needed)",
    )
    parser.add_argument(
        "--save-dir",
        type=Path,
        metavar="DIR",
        help="where experiments lie (default: outputs, or where -e leads)",
    )
    parser.add_argument(
        "--step",
        default="latest",
        metavar="N|latest|best",
        help="which checkpoint; best is the one with the lowest validation loss",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="the model directory to write (default: <save-dir>/<experiment>/export/step_…)",
    )
    parser.add_argument(
        "--dtype",
        type=options.dtype(*_DTYPES),
        choices=_DTYPES,
        help="dtype of the weights, also as bf16, fp32 or fp16; training keeps "
        "them in float32 (default: bfloat16; float32 with --adapter)",
    )
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with LoRA adapters, export these alone, as PEFT writes them "
        "(default: a model with the adapters merged into it)",
    )
    parser.add_argument(
        "-m",
        "--model-name",
        metavar="NAME|DIR",
        help="of a run with adapters, the model that they were trained beside, "
        "where it lies now (default: where the run found it)",
    )
    parser.add_argument(
        "--max-shard-size",
        type=options.positive_size,
        default="5GB",
        metavar="SIZE",
        help="bytes per safetensors file at most, for example 5GB or 512MiB",
    )
    parser.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the code that came with the model, where its type needs that; "
        "taken from the command line alone",
    )
    parser.add_common()
    opts = parser.parse(argv)
    paths.expand_save_dir(opts)
    return opts


def main(argv: list[str]) -> None:
    """Find the checkpoint, plan the files, write them, read them back, publish."""
    opts = parse(argv)
    if not opts.experiment_name:
        raise UsageError(
            "-e is needed: the experiment to export", found=list_experiments(opts.save_dir)
        )
    experiment = Experiment(opts.save_dir, opts.experiment_name)
    checkpoint = find_checkpoint(opts, experiment)
    has_adapters = require_kind(opts, checkpoint)
    opts.dtype = opts.dtype or ("float32" if opts.adapter else "bfloat16")
    out = opts.out or experiment.exports / (
        paths.step_name(checkpoint.step) + ("-adapter" if opts.adapter else "")
    )
    identity = {
        "options": {
            "dtype": opts.dtype,
            "max_shard_size": opts.max_shard_size,
            **({"adapter": True} if opts.adapter else {}),
        },
        "inputs": {"step": checkpoint.step, "checkpoint": checkpoint.commit()["manifest"]},
    }
    if publish.is_done(out, KIND, identity, opts.overwrite, dry_run=opts.dry_run):
        log.info(
            f"already done: {out} holds step {checkpoint.step:,}\n"
            + next_command(out, opts.adapter)
        )
        return
    companions.require_intact(experiment, checkpoint)

    from lib.export import base_model
    from lib.train import journal

    config = journal.read_config(experiment)
    base = base_model.find(opts.model_name, config, checkpoint) if has_adapters else None
    damage = None if opts.dry_run else begin_hashing(checkpoint, for_export=not has_adapters)

    import torch

    from lib.export.formats import AdapterExport, ModelExport
    from lib.export.lora_run import LoraRun
    from lib.models import architecture

    model = architecture.build_on_meta(experiment.model, trust_code=opts.trust_remote_code)
    dtype = getattr(torch, opts.dtype)
    adapted = LoraRun.from_checkpoint(checkpoint, model, base.directory) if base else None
    export: Export = (
        AdapterExport(model, adapted, dtype)
        if adapted and opts.adapter
        else ModelExport(model, checkpoint, adapted, dtype, opts.max_shard_size)
    )
    log.info(f"export of {checkpoint.path}")
    log.table(
        {
            "model": f"{model.config.model_type}, {units.count(model.num_parameters())} parameters",
            **({"trained": adapted.describe()} if adapted else {}),
            "to": f"{out}, {opts.dtype}, {units.size(export.bytes)} in "
            f"{units.counted(export.files, 'file')}",
        }
    )
    if damage is None:
        return
    require_intact(checkpoint, damage.result())
    if base and adapted:
        base_model.require_whole(base.directory, config, checkpoint, not opts.no_progress)
        adapted.load()
    write(opts, experiment, config, export, base, out, identity)


def write(
    opts: Options,
    experiment: Experiment,
    config: dict[str, Any],
    export: Export,
    base: BaseModel | None,
    out: Path,
    identity: dict[str, Any],
) -> None:
    """Write the files, read them back, check adapters, publish, and say how it went."""
    began = time.monotonic()
    checkpoint = export.checkpoint
    names = config.get("options", {})
    publish.require_space(out.parent, int(export.bytes * 1.01), "the export")
    with publish.Build(out, KIND, identity, opts.overwrite) as build:
        of_config = companions.write_companions(
            experiment,
            checkpoint,
            export.model,
            build.dir,
            opts.dtype,
            names,
            opts.trust_remote_code,
            export.adapter_of,
        )
        files = [manifest.file_entry(build.dir, path, "sha256") for path in build.files()]
        with Progress("exporting", export.bytes, "B", not opts.no_progress) as bar:
            try:
                weights = export.write(build.dir, bar.advance)
            except FileNotFoundError:
                require_there(checkpoint)
                raise
        seconds = time.monotonic() - began
        export.verify(build.dir)
        export.check_adapter(build.dir, not opts.no_progress)
        if base:
            base.require_unchanged()
        require_same(checkpoint, identity["inputs"]["checkpoint"])
        companions.require_intact(experiment, checkpoint)
        build.publish(
            stage="05_export_checkpoint.py",
            options=options.to_plain_values(opts),
            files=files + weights,
            summary={
                "step": checkpoint.step,
                "dtype": opts.dtype,
                "bytes": export.bytes,
                "tensors": export.tensors,
                **of_config,
            },
        )
    log.info(
        f"done: {units.counted(export.tensors, 'tensor')}, {units.size(export.bytes)}, "
        f"written and read "
        f"back in {units.duration(seconds)} ({units.size(export.bytes / seconds)}/s)\n"
        + next_command(out, opts.adapter)
    )


def require_kind(opts: Options, checkpoint: commit.Checkpoint) -> bool:
    """Tell whether a run has adapters; UsageError for an option that only such a run can have."""
    has_adapters = bool(checkpoint.commit().get("identity", {}).get("options", {}).get("lora_rank"))
    given = (["--adapter"] if opts.adapter else []) + (["--model-name"] if opts.model_name else [])
    if given and not has_adapters:
        raise UsageError(
            f"{' and '.join(given)} {'belongs' if len(given) == 1 else 'belong'} to a run with "
            "LoRA adapters",
            found=f"{checkpoint.path.parents[1]} trains the whole model",
            run=commands.as_typed(drop=["--adapter", "-m", "--model-name"]),
        )
    return has_adapters


def find_checkpoint(opts: Options, experiment: Experiment) -> commit.Checkpoint:
    """Return the checkpoint that --step names; UsageError or ArtifactError when there is none.

    A damaged one is never passed over in silence for an older one.
    """
    if not (experiment.model / "config.json").is_file():
        raise ArtifactError(
            f"no experiment {experiment.root}", found=list_experiments(opts.save_dir)
        )
    if opts.step not in ("latest", "best") and not opts.step.isdecimal():
        raise UsageError(f"--step takes a number, latest or best, got {opts.step!r}")
    found = {c.step: c for c in commit.list_checkpoints(experiment.checkpoints)}  # newest first
    steps = [step for step, c in found.items() if not c.problems()]
    whole = ", ".join(map(str, steps)) or "none"
    if not found:
        raise ArtifactError(
            f"no valid checkpoint in {experiment.checkpoints}",
            run=commands.train("--config", experiment.config) if experiment.config.exists() else "",
        )
    if opts.step == "best":
        losses = card.validation_losses(found.values(), experiment.metrics)
        if not losses:
            raise ArtifactError(
                "no checkpoint here was saved right after an evaluation",
                found=f"steps {whole}",
                run=commands.as_typed("--step", "latest"),
            )
        chosen = found[min(losses, key=losses.__getitem__)]
    else:
        step = next(iter(found)) if opts.step == "latest" else int(opts.step)
        if step not in found:
            raise ArtifactError(f"no valid checkpoint of step {step}", found=f"steps {whole}")
        chosen = found[step]
    if problems := chosen.problems():
        raise ArtifactError(
            f"checkpoint {chosen.path} is damaged",
            found="\n".join(problems),
            **suggest_older(steps, chosen.step),
        )
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


def begin_hashing(checkpoint: commit.Checkpoint, for_export: bool) -> Future[list[str]]:
    """Start to hash what will be read, beside the imports; the result is what is damaged.

    for_export: without the optimizer's files.
    """

    def work() -> list[str]:
        parts = min(8, os.cpu_count() or 1)
        with ThreadPoolExecutor(parts) as pool:
            found = pool.map(
                lambda i: checkpoint.content_problems(i, parts, for_export), range(parts)
            )
            return [problem for problems in found for problem in problems]

    pool = ThreadPoolExecutor(1)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def require_intact(checkpoint: commit.Checkpoint, problems: list[str]) -> None:
    """Raise ArtifactError when hashing found damage; nothing has been unpickled so far."""
    require_there(checkpoint)
    if problems:
        raise ArtifactError(
            f"checkpoint {checkpoint.path} is damaged",
            found="\n".join(problems),
            **suggest_older(
                [
                    c.step
                    for c in commit.list_checkpoints(checkpoint.path.parent)
                    if not c.problems()
                ],
                checkpoint.step,
            ),
        )


def require_there(checkpoint: commit.Checkpoint) -> None:
    """Raise ArtifactError when the checkpoint went away before its files were open."""
    if not checkpoint.path.exists():
        raise ArtifactError(
            f"{checkpoint.path} was deleted meanwhile: the run that goes on there "
            "keeps only its newest",
            run=commands.as_typed(),
        )


def require_same(checkpoint: commit.Checkpoint, chosen: str) -> None:
    """Raise ArtifactError when another checkpoint has taken the place of the one that was chosen.

    chosen: the digest of its manifest. One that is gone was read all the same: files stay open.
    """
    try:
        found = checkpoint.commit()["manifest"]
    except FileNotFoundError:
        return
    if found != chosen:
        raise ArtifactError(
            f"{checkpoint.path} was replaced meanwhile by one of another run; nothing was exported",
            run=commands.as_typed(),
        )


def next_command(out: Path, is_adapter: bool) -> str:
    """Return what to type next."""
    if is_adapter:
        return (
            f"next: PeftModel.from_pretrained(base, {str(out)!r}), `vllm serve BASE "
            f"--enable-lora --lora-modules NAME={out}`, or train on with stage 04 from it, as "
            + commands.shell("--lora-from", out)
        )
    return (
        f"next: AutoModelForCausalLM.from_pretrained({str(out)!r}), or train on with "
        "stage 04 from it, as " + commands.shell("-m", out)
    )


if __name__ == "__main__":
    stage.run(main)
