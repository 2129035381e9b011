"""The place where an item runs: the kit, a directory, the device, and stages as child processes.

An item either computes in its own process or runs stages: a process that has used a GPU, or torch's
threads, cannot fork a stage that uses them. If an item needs both, it runs the stages first, and
`with_weights` initialises weights in a child process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.gpu import hooks, machine
from tests.process_tree import list_descendants

ROOT = hooks.ROOT
FIGURES_FILE = "figures.json"
_TAIL_CHARACTERS = 3000  # of a failed stage's output, to be shown
_UNKNOWN_OPTION = re.compile(r"error: (unknown option .*|.*invalid choice.*|-b.*got 'auto')")
_TOO_LARGE = re.compile(r"error: (this run does not fit.*)")
_NOT_COMPILED = "the model cannot be compiled here"
# The model that replaces a larger one in a rehearsal; `small` replaces all others.
_REHEARSAL_MODELS = {"moe": "moe-small", "moe-small": "moe-small", "gemma": "gemma"}
_POLL_S = 0.05
_GONE_WITHIN_S = 10.0


class NotHere(Exception):
    """Raised if this machine or this version of the code lacks something; the text names it."""


@dataclass
class Place:
    """The place where an item runs.

    kit: directory of the kit. work: the item's own directory. out: directory of the results.
    device: cuda, or cpu in a rehearsal. gpus: number of GPUs. start: how processes start, fork or
    spawn. earlier: the measurements of the items that have passed in this invocation. figures: the
    measurements of the item so far; `note` also writes them to a file.
    """

    kit: Path
    work: Path
    out: Path
    device: str
    gpus: int = 0
    start: str = "fork"
    earlier: dict[str, dict[str, Any]] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    def size(self, on_gpu: Any, in_rehearsal: Any) -> Any:
        """Return the first value on a GPU, the second in a rehearsal."""
        return on_gpu if self.on_gpu else in_rehearsal

    def note(self, **figures: Any) -> None:
        """Record measurements; they are kept if the item fails later."""
        self.figures |= figures
        (self.work / FIGURES_FILE).write_text(json.dumps(self.figures), encoding="utf-8")

    def need(self, condition: object, requirement: str) -> None:
        """Raise NotHere with the text of a requirement unless the condition holds."""
        if not condition:
            raise NotHere(requirement)

    def model(self, name: str, **changes: Any) -> Path:
        """Return the directory of a model, a small one in a rehearsal. changes: config values."""
        small = _REHEARSAL_MODELS.get(name, "small")
        source = self.kit / "models" / (name if self.on_gpu else small)
        if not changes:
            return source
        target = self.work / "models" / "-".join(map(str, (source.name, *changes.values())))
        if not target.exists():
            shutil.copytree(source, target)
            config = json.loads((source / "config.json").read_text())
            (target / "config.json").write_text(json.dumps(config | changes))
        return target

    def with_weights(self, name: str, **changes: Any) -> Path:
        """Return the directory of a copy of a model with random weights in bf16.

        A child process initialises them. So this process can still fork stages that use the GPU,
        and the weights take no GPU memory afterwards.
        """
        target = self.work / "weights" / "-".join(map(str, (name, *changes.values())))
        if not target.exists():
            shutil.copytree(self.model(name, **changes), target)
            child = multiprocessing.get_context(self.start).Process(
                target=_initialise_weights, args=(target, self.device)
            )
            child.start()
            child.join()
            assert child.exitcode == 0, (
                f"initialising weights for {name} ended with {child.exitcode}"
            )
        return target

    def train(self, name: str, *options: object, expect: int = 0, **launch_options: Any) -> Stage:
        """Run stage 04 to its end; see `begin`."""
        return self.begin(name, *options, **launch_options).wait_for_end(expect)

    def begin(
        self,
        name: str,
        *options: object,
        model: str | Path = "small",
        hook: str = "change_nothing",
        scratch: bool = True,
        data: str = "data",
        **launch_options: Any,
    ) -> Stage:
        """Start stage 04. If an option is given here and in `options`, the latter wins.

        scratch: initialise the weights instead of reading them. data: a dataset of the kit.
        """
        directory = model if isinstance(model, Path) else self.model(model)
        scratch_option = ["--from-scratch"] if scratch else []
        return self.launch(
            "04_train_fsdp.py",
            "-e",
            name,
            "-d",
            self.kit / data,
            "-m",
            directory,
            *scratch_option,
            "--save-dir",
            self.work / "outputs",
            "--cache-dir",
            self.kit / ".cache",
            "--no-progress",
            "--log-freq",
            1,
            "--eval-freq",
            0,
            "--eval-batches",
            1,
            "--ckpt-freq",
            10**6,
            *options,
            hook=hook,
            **launch_options,
        )

    def launch(
        self,
        script: str,
        *arguments: object,
        hook: str = "change_nothing",
        ranks: int = 0,
        fresh: bool = False,
        command: Sequence[object] = (),
        env: dict[str, str] | None = None,
    ) -> Stage:
        """Start a stage.

        ranks: number of ranks to start with torchrun; 0 starts no torchrun. fresh: start a new
        interpreter instead of forking this one. command: a launcher to use instead of torchrun.
        """
        if "-e" in arguments:
            name = arguments[arguments.index("-e") + 1]
        else:
            name = "stage"
        experiment = self.work / "outputs" / name
        output = self.work / f"{name}.log"
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        words = [hook, script, *map(str, arguments)]
        if not (ranks or fresh or command):
            assert self.start != "fork" or not _uses_gpu(), (
                "this process has used the GPU: it cannot fork a stage any more"
            )
            context = multiprocessing.get_context(self.start)
            process = context.Process(
                target=_become_stage, args=(words, self.work, output, env or {})
            )
            process.start()
            return Stage(process, experiment, output)
        words = (
            [str(ROOT / "tests/gpu/hooks.py"), *words]
            if hook != "change_nothing"
            else [str(ROOT / script), *words[2:]]
        )
        launcher = list(map(str, command)) or (torchrun if ranks else [sys.executable])
        words = words[1:] if command else words
        with output.open("a") as file:
            process = subprocess.Popen(
                [*launcher, *words],
                cwd=self.work,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        return Stage(process, experiment, output)


def _uses_gpu() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _initialise_weights(directory: Path, device: str) -> None:
    """Write random weights into the directory of a model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory), dtype=torch.bfloat16
        )
    model.save_pretrained(directory)


def _become_stage(words: list[str], cwd: Path, output: Path, env: dict[str, str]) -> None:
    """Turn this process into a stage that prints to a file."""
    with output.open("a") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    os.chdir(cwd)
    os.environ.update(env)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    hooks.main(*words)


class Stage:
    """A started stage. experiment: directory of its run. began: seconds by time.monotonic()."""

    def __init__(self, process: Any, experiment: Path, output: Path) -> None:
        self._process = process
        self.experiment = experiment
        self._output = output
        self._offset = 0
        self.pid = process.pid
        self.began = time.monotonic()

    @property
    def printed(self) -> str:
        """Return the output of this launch of the run and of earlier ones."""
        return self._output.read_text(errors="replace")

    @property
    def log_lines(self) -> list[str]:
        """Return the lines of the log of rank 0, without time and level."""
        path = self.experiment / "logs" / "rank_00000.log"
        return [line.split(" ", 3)[-1] for line in path.read_text().splitlines()]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl."""
        path = self.experiment / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def losses(self) -> list[float]:
        return [row["train/loss"] for row in self.rows]

    def wait_for(self, step: int) -> None:
        """Wait until a step is logged. Raises AssertionError if the run ends before."""
        while not self.rows or self.rows[-1]["step"] < step:
            assert self._code() is None, (
                f"ended before step {step}:\n{self.printed[-_TAIL_CHARACTERS:]}"
            )
            time.sleep(_POLL_S)

    def wait_for_end(self, expect: int | None = 0) -> Stage:
        """Wait for the end and check the exit code.

        Raises NotHere if this version lacks an option, if the GPU is too small, or if the machine
        has no compiler that the run needs.
        """
        while (code := self._code()) is None:
            time.sleep(_POLL_S)
        printed = self.printed
        if code and code != expect:
            if unknown_option := _UNKNOWN_OPTION.search(printed):
                raise NotHere(f"not in this version: {unknown_option[1]}")
            if too_large := _TOO_LARGE.search(printed):
                raise NotHere(too_large[1])
            if _NOT_COMPILED in printed and (missing := machine.describe_missing_compiler()):
                raise NotHere(missing)
        assert expect is None or code == expect, (
            f"exit code {code}, expected {expect}:\n{printed[-_TAIL_CHARACTERS:]}"
        )
        return self

    def signal(self, number: int) -> Stage:
        """Send a signal to the process that was started."""
        os.kill(self.pid, number)
        return self

    def _code(self) -> int | None:
        if isinstance(self._process, subprocess.Popen):
            return self._process.poll()
        return self._process.exitcode


def kill_tree(pid: int) -> None:
    """Kill a process, its session and all its descendants, and wait until they are gone.

    Until then they use memory of the GPU.
    """
    processes = list(list_descendants(pid))
    with suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_WITHIN_S
    while any(map(_is_alive, processes)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)


def _is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False
