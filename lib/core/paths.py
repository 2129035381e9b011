"""The paths of all artifacts: no other module spells their names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from lib.core.errors import UsageError

if TYPE_CHECKING:
    from lib.core.options import Options

MANIFEST = "manifest.json"
DCP_METADATA = ".metadata"  # of torch.distributed.checkpoint, which writes it last
COMMIT = "COMMIT.json"  # in a checkpoint that is complete
PARTIAL = ".partial-"  # in the name of a directory that is not finished
OUTPUTS = Path("outputs")
CHAT_TEMPLATES = Path(__file__).resolve().parents[2] / "chat_templates"  # those of the project
# The Makefile's names of models and datasets that a command without a name must not use.
TRIAL_NAMES = ("demo", "demo-chat", "test-quick")
RAW_RECORD = ".hub"  # in a directory of raw text: the hidden record of a download
_PLANNED_MOUNTS = Path("/etc/fstab")
_MOUNTS = Path("/proc/self/mounts")


def model_dir_name(model_name: str) -> str:
    """Return the directory name of a model: `mistralai/Mathstral` → `mistralai--Mathstral`."""
    return model_name.strip("/").replace("/", "--")


def models_root(cache_dir: Path) -> Path:
    """Return the directory that stage 03 fills with models."""
    return cache_dir / "models"


def tokens_root(cache_dir: Path) -> Path:
    """Return the directory that stage 04 fills with token stores."""
    return cache_dir / "tokens"


def suites_root(cache_dir: Path) -> Path:
    """Return the directory that stage 03 fills with suites of evaluation tasks."""
    return cache_dir / "eval"


def classifiers_root(cache_dir: Path) -> Path:
    """Return the directory for fastText models that classify rows of a dataset."""
    return cache_dir / "classifiers"


def verified_root(cache_dir: Path) -> Path:
    """Return the directory where stage 04 records which artifacts it has hashed."""
    return cache_dir / "verified"


def scratch_root(cache_dir: Path) -> Path:
    """Return the directory for configs and tokenizers that stage 04 creates."""
    return cache_dir / "scratch"


def streaming_root(cache_dir: Path, dataset_name: str) -> Path:
    """Return the directory for the parts of a dataset that stage 04 fetches with --online."""
    return cache_dir / "streaming" / model_dir_name(dataset_name)


def is_name(text: str) -> bool:
    """Return whether a text can name an experiment: as a directory, and typed in a command."""
    return (
        text.isprintable()
        and not text.startswith(("-", "."))
        and "/" not in text
        and 0 < len(text.encode()) <= 200
    )


def find_hf_home() -> Path:
    """Return the directory of the Hugging Face libraries, as the environment variables set it."""
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{caches}/huggingface"
    return Path(os.path.expandvars(home)).expanduser()


def short_name(model_dir: Path) -> str:
    """Return org/name for a snapshot in the Hugging Face cache, and the path of other models."""
    repository = model_dir.parent.parent.name
    is_snapshot = model_dir.parent.name == "snapshots" and repository.startswith("models--")
    return repository.removeprefix("models--").replace("--", "/") if is_snapshot else str(model_dir)


def expand_save_dir(opts: Options) -> None:
    """Set -e to the experiment's name and --save-dir to the directory that contains it.

    Raises UsageError if the options contradict each other.
    """
    if opts.experiment_name:
        root = experiment(opts.experiment_name, opts.save_dir).root
        opts.save_dir = root.parent
        opts.experiment_name = root.name
    opts.save_dir = opts.save_dir or OUTPUTS


def existing_experiment(text: str) -> Experiment:
    """Return the experiment that a person names. Raises UsageError as `experiment` does.

    If outputs/ does not contain the name, a directory of that name in the current directory counts.
    `sweep/a` may also mean outputs/sweep/a.
    """
    in_outputs = experiment(text)
    if not in_outputs.root.exists():
        for root in (Path(text).absolute(), OUTPUTS / text):
            if root.is_dir():
                return Experiment(root.parent, root.name)
    return in_outputs


def experiment(text: str, save_dir: Path | None = None) -> Experiment:
    """Return the experiment with a name in `save_dir`, or with a path to its directory.

    `exp` lies in `save_dir` (None: outputs/). `outputs/exp` is that directory, with or without a
    slash at its end. Raises UsageError for any other text, or a path outside of `save_dir`.
    """
    path = Path(text)
    if text and path.name in ("", ".."):
        path = path.absolute().resolve()
    is_path = len(path.parts) > 1 or text.startswith(".")
    if not is_name(path.name):
        raise UsageError(
            f"{text!r} is not a name of an experiment",
            expected="a name for a directory, not beginning with - or ., or the path "
            "of such a directory",
        )
    if is_path and save_dir is not None and save_dir.resolve() != path.parent.resolve():
        raise UsageError(
            f"{text} does not lie in --save-dir {save_dir}",
            expected=f"-e {path.name} to mean {save_dir / path.name}, or --save-dir {path.parent}",
        )
    return Experiment(path.parent if is_path else save_dir or OUTPUTS, path.name)


def find_missing_mount(path: Path) -> Path | None:
    """Return the mount point of /etc/fstab that contains a path but is not mounted, if any.

    Files below it would be written to the disk that contains the empty mount point.
    """
    planned = _list_mount_points(_PLANNED_MOUNTS)
    mounted = _list_mount_points(_MOUNTS)
    path = path.resolve()
    for directory in (path, *path.parents):
        if directory in mounted:
            return None
        if directory in planned and mounted:
            return directory
    return None


def _list_mount_points(table: Path) -> set[Path]:
    """Return the second column of a table of file systems; empty if it cannot be read."""
    try:
        lines = os.fsdecode(table.read_bytes()).splitlines()
    except OSError:
        return set()
    rows = [line.split() for line in lines if not line.lstrip().startswith("#")]
    return {
        Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), row[1]))
        for row in rows
        if len(row) > 2
    }


class Experiment:
    """The paths that a training run writes under `outputs/<experiment>/`."""

    def __init__(self, save_dir: Path, name: str) -> None:
        self.root = save_dir / name
        self.config = self.root / "config.yaml"
        self.model = self.root / "model"
        self.state = self.root / "state.json"
        self.metrics = self.root / "metrics.jsonl"
        self.samples = self.root / "samples.jsonl"
        self.prometheus = self.root / "metrics.prom"
        self.events = self.root / "events.jsonl"
        self.tensorboard = self.root / "tb"
        self.plot = self.root / "loss.png"
        self.report = self.root / "report.html"
        self.logs = self.root / "logs"
        self.profile = self.root / "profile"
        self.checkpoints = self.root / "checkpoints"
        self.stop_file = self.root / "stop"
        self.lock = self.root / "lock.json"
        self.exports = self.root / "export"

    def is_empty(self) -> bool:
        """Return whether the directory is missing, or has only the first files of a launch."""
        first = (self.lock.name, f"{self.config.name}.tmp-")
        return not self.root.is_dir() or all(
            path.name.startswith(first) for path in self.root.iterdir()
        )

    def rank_log(self, rank: int) -> Path:
        """Return the log file of a rank."""
        return self.logs / f"rank_{rank:05d}.log"


def step_name(step: int) -> str:
    """Return the directory name of a step's checkpoint or export: 1000 → `step_00001000`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step in a directory name, or None if it is not the name of a step."""
    digits = name.removeprefix("step_")
    return int(digits) if name.startswith("step_") and digits.isdecimal() else None


def escape_path(path: str) -> str:
    """Return a path as valid UTF-8 on one line; other bytes and line breaks are escaped."""
    try:
        text = os.fsencode(path).decode("utf-8", "backslashreplace")
    except UnicodeEncodeError:  # a name from a damaged list, which no file can have
        text = ascii(path)
    return text.replace("\r", "\\r").replace("\n", "\\n")
