"""Report weights in formats that are not supported, with the commands that convert them."""

from __future__ import annotations

from pathlib import Path

from lib.core import commands, paths
from lib.core.errors import ArtifactError, StageError, UsageError

_OPTION = ("-m", "--model-name")
_PICKLES = ("pytorch_model*.bin", "consolidated*.pth")
_SHARDED = "*.distcp"  # of torch.distributed.checkpoint
_CONVERT = (
    "import sys; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; "
    "a, b = sys.argv[1:]; M.from_pretrained(a, dtype='auto').save_pretrained(b); "
    "T.from_pretrained(a).save_pretrained(b)"
)


def find_error(path: Path) -> StageError | None:
    """Return the error for a directory with weights in another format, or None if there are none.

    The error contains the commands that convert the weights.
    """
    if not path.is_dir():
        return None
    if error := _find_run_error(path):
        return error
    folders = (path, *sorted(path.glob("*/")), *sorted(path.glob("*/*/")))
    sharded = next(
        (folder for folder in folders if any(folder.glob(_SHARDED)) and "optim" not in folder.name),
        None,
    )
    if sharded:
        return _sharded_error(path, sharded)
    pickles = [file.name for pattern in _PICKLES for file in sorted(path.glob(pattern))]
    return _pickle_error(path, pickles) if pickles else None


def _find_run_error(path: Path) -> StageError | None:
    """Return the error if the path is an experiment of stage 04 or one of its checkpoints."""
    for run in (path, path.parent, path.parent.parent, path.parent.parent.parent):
        commits = sorted(run.glob(f"checkpoints/step_*/{paths.COMMIT}"))
        if commits and (path == run or path.is_relative_to(run / "checkpoints")):
            target = run / "export" / "model"
            step = next(
                (
                    paths.step_of(commit.parent.name)
                    for commit in commits
                    if path.is_relative_to(commit.parent)
                ),
                None,
            )
            step_option = () if step is None else ("--step", step)
            return UsageError(
                f"{path} contains checkpoints of a run, not a model",
                hint="export one:",
                run="\n".join(
                    (
                        commands.script(
                            "05_export_checkpoint.py", "-e", run, *step_option, "--out", target
                        ),
                        commands.replace_value(_OPTION, path, target),
                    )
                ),
            )
    return None


def _sharded_error(path: Path, folder: Path) -> StageError:
    target = path.with_name(f"{path.resolve().name}-model")
    return UsageError(
        f"{folder} contains a sharded checkpoint of FSDP, but only safetensors are supported",
        expected="model.safetensors beside a config.json",
        found=", ".join(sorted(file.name for file in folder.glob(_SHARDED))[:3]),
        hint="stage 05 makes a model of it; replace MODEL with the model that it was trained from:",
        run="\n".join(
            (
                commands.script(
                    "05_export_checkpoint.py",
                    *("--from-dcp", folder, "-m", "MODEL", "--dtype", "float32", "--out", target),
                ),
                commands.replace_value(_OPTION, path, target),
            )
        ),
    )


def _pickle_error(path: Path, names: list[str]) -> StageError:
    target = path.with_name(f"{path.resolve().name}-safetensors")
    listed = ", ".join(names[:5])
    if not (path / "config.json").is_file() or not any(n.endswith(".bin") for n in names):
        return ArtifactError(
            f"{path} contains pickled weights, but only safetensors are supported",
            found=listed,
            expected="model.safetensors beside a config.json",
            hint="`save_pretrained` of transformers writes both",
        )
    return UsageError(
        f"{path} contains pickled weights, but only safetensors are supported",
        expected="model.safetensors, as current versions of `save_pretrained` write it",
        found=listed,
        hint="stage 03 converts the pickles of a model on the Hub with --allow-pickle. If you "
        "trust the origin of these files, transformers can convert them:",
        run="\n".join(
            (
                commands.python("-c", _CONVERT, path, target),
                commands.replace_value(_OPTION, path, target),
            )
        ),
    )
