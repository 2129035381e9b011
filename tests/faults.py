"""Start launches of a tiny run with faults, and compare them with an undisturbed run."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from lib.checkpoints import commit
from lib.checkpoints.commit import Checkpoint
from lib.runs.growing_files import JsonLines
from tests import forks
from tests.conftest import ROOT, free_port, run_stage
from tests.fault_points import Fault
from tests.training import SEQ_LENGTH, VOCABULARY, metrics, save_model

STEPS = 12
# With these options no step depends on the total number of steps.
COMMON_OPTIONS = (
    "-d",
    "corpus",
    "-s",
    SEQ_LENGTH,
    "--precision",
    "fp32",
    "--lr",
    "1e-2",
    "--lr-scheduler",
    "constant",
    "--warmup-steps",
    2,
    "--global-batch-size",
    4,
    "--log-freq",
    1,
    "--eval-freq",
    0,
    "--eval-batches",
    1,
)
DROPOUT_MODEL = ("-m", "dropout")
PLAIN_MODEL = ("-m", "model")
EXACT_FIGURES = (
    "step",
    "train/loss",
    "train/grad_norm",
    "train/learning_rate",
    "train/tokens_seen",
)


class Launch(forks.Launch):
    """Stage 04 on one or more ranks."""

    def __init__(self, reports: IO[bytes], output_file: Path) -> None:
        super().__init__(reports)
        self.output_file = output_file

    @property
    def output(self) -> str:
        """Return the output of all ranks."""
        return self.output_file.read_text(errors="replace")

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition; the launch must run until then."""
        deadline = time.monotonic() + forks.TIMEOUT_S
        while not condition():
            assert not self.poll(), f"ended before: {self.output[-3000:]}"
            assert time.monotonic() < deadline, self.output[-3000:]
            time.sleep(0.002)


class Server:
    """Starts launches of stage 04 in a project, with the faults that a test asks for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._connections = root / "connections.txt"
        self._launches: list[Launch] = []

    def start(
        self,
        *argv: object,
        ranks: int = 1,
        faults: dict[int, Fault] | None = None,
        clock: int = 0,
        call: str = "",
        before: str = "tests.fault_points:install_fault",
    ) -> Launch:
        """Start stage 04. faults: by rank. clock: seconds by which the clock is wrong.

        call: `module:function` to call instead of the stage. before: `module:function` that each
        rank calls first, which installs its fault.
        """
        output = self.root / f"output_{len(self._launches):05d}.txt"
        environment = {
            **os.environ,
            **forks.CPU_VARIABLES,
            "NETWORK_GUARD_REPORT": str(self._connections),
        }
        facts = {
            "clock": clock,
            "faults": {rank: asdict(fault) for rank, fault in (faults or {}).items()},
        }
        with output.open("ab") as file:
            launch = Launch(
                forks.get_server("stages").start(
                    str(ROOT / "04_train_fsdp.py"),
                    argv,
                    self.root,
                    environment,
                    file.fileno(),
                    file.fileno(),
                    forks.rank_variables(ranks, free_port()) if ranks > 1 else [{}],
                    before=before,
                    given=facts,
                    **({"call": call} if call else {}),
                ),
                output,
            )
        self._launches.append(launch)
        return launch

    def run(self, *argv: object, expect: int | None = 0, **options: Any) -> Launch:
        """Run stage 04 to its end; assert the exit code of rank 0 (None: any)."""
        launch = self.start(*argv, **options)
        codes = launch.wait()
        assert expect is None or codes[0] == expect, f"{codes}\n{launch.output[-4000:]}"
        return launch

    def close(self) -> None:
        """Kill the launches that still run."""
        for launch in self._launches:
            launch.kill()
        assert not self._connections.exists(), self._connections.read_text()


@dataclass(frozen=True)
class Undisturbed:
    """A run without faults that saved every step. content: digests by step and file."""

    rows: list[dict[str, Any]]
    content: dict[int, dict[str, str]]

    def require_same(self, outputs: Path, experiment: str = "run", since: int = 0) -> None:
        """Assert that a disturbed run has the same figures and checkpoints, bit for bit.

        since: rows of steps up to this one may be missing, since a power cut may lose them.
        """
        rows = [
            {key: row[key] for key in EXACT_FIGURES} for row in metrics(outputs.parent, experiment)
        ]
        early_steps = {row["step"] for row in rows if row["step"] <= since}
        assert rows == [
            row for row in self.rows if row["step"] in early_steps or row["step"] > since
        ]
        self.require_sound(outputs, experiment)

    def require_sound(self, outputs: Path, experiment: str = "run") -> None:
        """Assert that each checkpoint that verifies has the content of the undisturbed run."""
        for checkpoint in commit.list_checkpoints(outputs / experiment / "checkpoints"):
            if not checkpoint.problems() + checkpoint.content_problems(0, 1):
                assert content(checkpoint) == self.content[checkpoint.step], checkpoint.path


def content(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the digests of a checkpoint's files without `.metadata`, which differs per save."""
    return {
        entry["path"]: entry["digest"]
        for entry in checkpoint.manifest()["files"]
        if not entry["path"].endswith(".metadata")
    }


def find_valid_steps(outputs: Path, experiment: str = "run") -> list[int]:
    """Return the steps of the checkpoints without damage, newest first."""
    return [
        checkpoint.step
        for checkpoint in commit.list_checkpoints(outputs / experiment / "checkpoints")
        if not checkpoint.problems() and not checkpoint.content_problems(0, 1)
    ]


def read_events(outputs: Path, experiment: str = "run") -> list[dict[str, Any]]:
    """Return the rows of events.jsonl, without rows that a kill has cut."""
    return JsonLines(outputs / experiment / "events.jsonl").update()


def flip_bit(path: Path, bit: int = -8) -> None:
    """Flip a bit of a file; a negative number counts from the end. By default, in the last byte."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def pin_to_core(core: int = 0) -> Callable[[], None]:
    """Return a preexec_fn that keeps a command on one core, as `install_fault` does."""
    return lambda: os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[core]})


def find_start_step(outputs: Path) -> int:
    """Return the step from which the last launch continued, 0 if it began anew."""
    return [
        event["step"] for event in read_events(outputs) if event["event"] in ("start", "resume")
    ][-1]


def run_options(
    outputs: Path, *options: object, experiment: str = "run", steps: int = STEPS
) -> tuple[object, ...]:
    """Return the options of a run of the dropout model that saves every second step."""
    return (
        *COMMON_OPTIONS,
        *DROPOUT_MODEL,
        "-e",
        experiment,
        "--save-dir",
        outputs,
        "--max-steps",
        steps,
        "--ckpt-freq",
        2,
        *options,
    )


@pytest.fixture(scope="session")
def server(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a Server for a project with the models `model` and `dropout`."""
    server = make_server(prepared_once, tmp_path_factory.mktemp("faults"))
    yield server
    server.close()


def make_server(prepared: Path, root: Path) -> Server:
    """Return a Server for `root`, an empty directory. prepared: of `prepared_once`."""
    from transformers import GPT2Config

    shutil.copytree(prepared, root, dirs_exist_ok=True)
    shutil.copytree(root / "model", root / "dropout")
    (root / "dropout" / "model.safetensors").unlink()
    save_model(
        root / "dropout",
        GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=64,
            n_embd=32,
            n_layer=1,
            n_head=2,
            embd_pdrop=0.2,
            resid_pdrop=0.2,
            attn_pdrop=0.2,
            bos_token_id=0,
            eos_token_id=1,
        ),
    )
    # Both models have the same tokenizer, so they share the token store.
    run_stage(
        "04_train_fsdp.py", *COMMON_OPTIONS, *DROPOUT_MODEL, "-e", "x", "--prepare-only", cwd=root
    )
    return Server(root)


@pytest.fixture(scope="session")
def undisturbed(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Undisturbed]:
    """Return a function that runs without faults, once per number of ranks and steps."""

    @functools.cache
    def get(ranks: int = 1, steps: int = STEPS) -> Undisturbed:
        outputs = tmp_path_factory.mktemp("undisturbed") / "outputs"
        return run_undisturbed(
            server, run_options(outputs, steps=steps), outputs, steps, ranks=ranks
        )

    return get


def run_undisturbed(
    server: Server, options: tuple[object, ...], outputs: Path, steps: int, **more: Any
) -> Undisturbed:
    """Run without faults, saving every step; return the rows and digests.

    more: as for Server.start.
    """
    server.run(*options, "--ckpt-keep", 0, "--ckpt-freq", 1, "--ckpt-async", "off", **more)
    rows = [{key: row[key] for key in EXACT_FIGURES} for row in metrics(outputs.parent, "run")]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    checkpoints = commit.list_checkpoints(outputs / "run" / "checkpoints")
    return Undisturbed(rows, {checkpoint.step: content(checkpoint) for checkpoint in checkpoints})
