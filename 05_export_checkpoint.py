#!/usr/bin/env python3
"""Stage 05: export a checkpoint as a Hugging Face model directory.

  python 05_export_checkpoint.py -e exp
  python 05_export_checkpoint.py -e exp --step best --dtype float32 --out my-model
  python 05_export_checkpoint.py -e exp --adapter    # only the LoRA adapter, as PEFT writes it
  python 05_export_checkpoint.py --from-dcp DIR -m org/name    # the checkpoint of another trainer

The stage reads only outputs/<exp>/ and, for a LoRA run, the base model. With --from-dcp, it reads
the weights in DIR, and config and tokenizer from the model. It never uses the network, and holds
two tensors in memory at a time. `AutoModelForCausalLM.from_pretrained` loads the result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.checkpoints import commit
from lib.core import commands, declared, log, manifest, options, paths, publish, stage, units
from lib.core.declared import CommonOptions, option
from lib.core.errors import Problems, UsageError
from lib.core.paths import Experiment
from lib.core.progress import Progress
from lib.export import card, checkpoint_choice, companions
from lib.runs import figures

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lib.export.formats import Export
    from lib.export.lora_run import LoraRun

KIND = "export/1"
_DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True)
class ExportOptions(CommonOptions):
    """Contains the options of this stage."""

    experiment_name: str = option(
        "",
        "-e",
        metavar="NAME",
        help="name of the run, a directory under --save-dir, or a path to its directory (required)",
    )
    save_dir: Path = option(
        None,
        parse=Path,
        help="parent directory of the runs (default: outputs; if -e is a path, its parent)",
    )
    step: str = option(
        "latest",
        metavar="N|latest|best",
        help="which checkpoint to export; best is the checkpoint with the best value of --best-by",
    )
    best_by: str | None = option(
        None,
        parse=figures.parse_score,
        metavar="KEY",
        help="with --step best: the key of metrics.jsonl to compare, such as eval/TASK/accuracy "
        "(default: --best-by of the run, which is eval/loss by default)",
    )
    out: Path | None = option(
        None,
        parse=Path,
        help="the model directory to write (default: <save-dir>/<experiment>/export/step_…; with "
        "--from-dcp: DIR-export)",
    )
    dtype: str = option(
        None,
        parse=options.dtype(*_DTYPES),
        choices=_DTYPES,
        help="dtype of the weights; bf16, fp32 and fp16 are accepted too; the master weights are "
        "float32 (default: bfloat16; float32 with --adapter)",
    )
    adapter: bool = option(
        False,
        help="for a LoRA run, export only the adapter, in the format of PEFT "
        "(default: a model with the adapter merged into it)",
    )
    model_name: str | None = option(
        None,
        "-m",
        aliases=("hf_model", "model_name_or_path", "base_model"),
        metavar="NAME|DIR",
        help="for a LoRA run, the base model, if it was moved since the run; with --from-dcp, the "
        "model whose config and tokenizer belong to the weights (default: where the run found it)",
    )
    from_dcp: Path | None = option(
        None,
        parse=Path,
        metavar="DIR",
        help="instead of a run, export the weights of a checkpoint in the format of "
        "torch.distributed.checkpoint, as accelerate and the Hugging Face Trainer write it "
        "(default: none)",
    )
    cache_dir: Path = option(
        Path(".cache"), parse=Path, help="with --from-dcp: directory with the models of stage 03"
    )
    max_shard_size: int = option(
        "5GB",
        parse=options.positive_size,
        metavar="SIZE",
        help="maximum size of a safetensors file: bytes, or a number with a unit, such as "
        "5GB or 512MiB",
    )
    trust_remote_code: bool = option(
        False,
        help="run the code that came with the model, if its model type needs that; "
        "a config file cannot set it",
    )


def parse(argv: Sequence[str]) -> ExportOptions:
    """Return the options of the command line and of --config."""
    parser = options.Parser(__doc__, "-e NAME [options]")
    declared.add_options(parser, ExportOptions)
    parser.add_common()
    opts = parser.parse(argv)
    paths.expand_save_dir(opts)
    opts.dtype = opts.dtype or ("float32" if opts.adapter else "bfloat16")
    return declared.read_options(ExportOptions, opts)


def main(argv: list[str]) -> None:
    """Find the checkpoint, plan the files, write them, read them back, and publish them."""
    opts = parse(argv)
    if opts.from_dcp:
        export_foreign(opts, opts.from_dcp)
        return
    if not opts.experiment_name:
        raise UsageError(
            "-e is required: the experiment to export (or --from-dcp for another trainer's "
            "checkpoint)",
            found=checkpoint_choice.list_experiments(opts.save_dir),
        )
    experiment = Experiment(opts.save_dir, opts.experiment_name)
    checkpoint = checkpoint_choice.find_checkpoint(experiment, opts.step, opts.best_by)
    is_lora = check_adapter_options(opts, checkpoint)
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
            f"already done: {out} contains step {checkpoint.step:,}\n"
            + next_command(out, opts.adapter)
        )
        return
    companions.require_same_model_files(experiment, checkpoint)

    from lib.export.base_model import BaseModel
    from lib.runs import run_records

    config = run_records.read_config(experiment)
    base = BaseModel.find(opts.model_name, config, checkpoint) if is_lora else None
    damage = (
        None
        if opts.dry_run
        else checkpoint_choice.start_hashing(checkpoint, for_export=not is_lora)
    )

    from lib.export.lora_run import LoraRun
    from lib.models import architecture

    model = architecture.build_on_meta(experiment.model, trust_code=opts.trust_remote_code)
    lora_run = LoraRun.from_checkpoint(checkpoint, model, base) if base else None
    export = choose_export(opts, model, checkpoint, lora_run)
    log.info(f"export of {checkpoint.path}")
    log.table(
        {
            "model": f"{model.config.model_type}, {units.count(model.num_parameters())} parameters",
            **({"trained": lora_run.describe()} if lora_run else {}),
            "to": f"{out}, {opts.dtype}, {units.size(export.bytes)} in "
            f"{units.counted(export.files, 'file')}",
        }
    )
    warn_of_unused(model, base.directory if base else config.get("model_dir", experiment.model))
    if damage is not None:
        checkpoint_choice.require_undamaged(checkpoint, damage.result())
        if lora_run:
            lora_run.load(not opts.no_progress)
        write_export(opts, experiment, config, export, out, identity)


def choose_export(
    opts: ExportOptions,
    model: PreTrainedModel,
    checkpoint: commit.Checkpoint,
    lora_run: LoraRun | None,
) -> Export:
    """Return the export that the options ask for. model: the model of the run, on meta."""
    import torch

    from lib.export.formats import AdapterExport, MergedExport, ModelExport

    dtype = getattr(torch, opts.dtype)
    if lora_run is None:
        return ModelExport(model, checkpoint, dtype, opts.max_shard_size)
    if opts.adapter:
        return AdapterExport(lora_run, dtype)
    return MergedExport(lora_run, dtype, opts.max_shard_size)


def warn_of_unused(model: PreTrainedModel, model_dir: Path | str) -> None:
    """Warn about the weights of the model that the run began with, if its class ignores some."""
    from lib.models import weights

    weights.warn_of_unused(model, Path(model_dir))


def write_export(
    opts: ExportOptions,
    experiment: Experiment,
    config: dict[str, Any],
    export: Export,
    out: Path,
    identity: dict[str, Any],
) -> None:
    """Write the files, read them back, check them, publish, and log a summary.

    config: the content of the run's config.yaml. identity: the options and inputs of the export,
    recorded in its manifest.
    """
    began = time.monotonic()
    checkpoint = export.checkpoint
    publish.require_space(out.parent, int(export.bytes * 1.01), "the export")
    with publish.Build(out, KIND, identity, opts.overwrite) as build:
        config_summary = companions.write_companions(
            experiment.model,
            export.model,
            build.dir,
            opts.dtype,
            opts.trust_remote_code,
            experiment.root.name,
            card.collect_facts(checkpoint, experiment.metrics, config.get("options", {})),
            export.adapter_of,
        )
        files = [manifest.file_entry(build.dir, path, "sha256") for path in build.files()]
        with Progress("exporting", export.bytes, "B", not opts.no_progress) as bar:
            try:
                weights = export.write(build.dir, bar.advance)
            except FileNotFoundError:
                checkpoint_choice.require_present(checkpoint)
                raise
        seconds = time.monotonic() - began
        export.verify(build.dir)
        checkpoint_choice.require_not_replaced(checkpoint, identity["inputs"]["checkpoint"])
        companions.require_same_model_files(experiment, checkpoint)
        build.publish(
            stage="05_export_checkpoint.py",
            options=options.to_plain_values(opts),
            files=files + weights,
            summary={
                "step": checkpoint.step,
                "dtype": opts.dtype,
                "bytes": export.bytes,
                "tensors": export.tensors,
                **config_summary,
            },
        )
    if not companions.has_tokenizer(out):
        log.info(
            f"{out} contains no tokenizer, since {experiment.root} was trained on synthetic tokens"
        )
    log.info(
        f"done: {units.counted(export.tensors, 'tensor')}, {units.size(export.bytes)}, "
        f"written and read back in {units.duration(seconds)} "
        f"({units.size(export.bytes / seconds)}/s)\n" + next_command(out, opts.adapter)
    )


def export_foreign(opts: ExportOptions, source: Path) -> None:
    """Export the checkpoint of another trainer, with the config and tokenizer of -m.

    source: the directory of the checkpoint. Raises one UsageError for options that do not apply.
    """
    problems = Problems()
    typed = [("-e", opts.experiment_name), ("--adapter", opts.adapter)]
    typed.append(("--step", opts.step != "latest"))
    for name in (name for name, value in typed if value):
        problems.add(f"{name} belongs to a run of stage 04, not to --from-dcp")
    if not opts.model_name:
        problems.add(
            "--from-dcp needs -m NAME|DIR, the model whose config and tokenizer belong to the "
            "weights; it needs no weights"
        )
    problems.raise_if_any()
    from lib.export import foreign_model
    from lib.export.foreign_source import ForeignSource

    out = opts.out or source.with_name(f"{source.resolve().name}-export")
    values = {"dtype": opts.dtype, "max_shard_size": opts.max_shard_size}
    foreign_model.export_checkpoint(
        ForeignSource.find(source, opts.model_name or "", opts.cache_dir),
        foreign_model.ExportTarget(
            out, KIND, values, options.to_plain_values(opts), opts.overwrite
        ),
        trust_code=opts.trust_remote_code,
        dry_run=opts.dry_run,
        show_progress=not opts.no_progress,
    )
    if not opts.dry_run:
        log.info(next_command(out, False))


def check_adapter_options(opts: ExportOptions, checkpoint: commit.Checkpoint) -> bool:
    """Return whether a checkpoint belongs to a LoRA run.

    Raises UsageError if it does not, but an option requires a LoRA run.
    """
    is_lora = bool(checkpoint.commit().get("identity", {}).get("options", {}).get("lora_rank"))
    typed = (["--adapter"] if opts.adapter else []) + (["--model-name"] if opts.model_name else [])
    if typed and not is_lora:
        raise UsageError(
            f"{' and '.join(typed)} {'requires' if len(typed) == 1 else 'require'} a LoRA run",
            found=f"{checkpoint.path.parents[1]} trained the full model",
            run=commands.as_typed(drop=["--adapter", "-m", "--model-name"]),
        )
    return is_lora


def next_command(out: Path, is_adapter: bool) -> str:
    """Return a text with the possible next commands."""
    if is_adapter:
        return (
            f"next: PeftModel.from_pretrained(base, {str(out)!r}), `vllm serve BASE "
            f"--enable-lora --lora-modules NAME={out}`, or continue training with stage 04, as "
            + commands.shell("--lora-from", out)
        )
    return (
        "next: "
        + commands.module("lib.generate", out, "--prompt", "Once upon a time")
        + f"\nor:   AutoModelForCausalLM.from_pretrained({str(out)!r}), or stage 04 with "
        + commands.shell("-m", out)
    )


if __name__ == "__main__":
    stage.run_main(main)
