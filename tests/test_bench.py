# covers: lib/train/output/kinds.py, lib/train/output/output.py, lib/train/output/table.py
# covers: lib/train/output/bench_output.py, lib/train/output/run_output.py
# covers: lib/train/output/bench_report.py
# covers: lib/train/output/communication.py
# covers: lib/train/new_model.py, 04_train_fsdp.py
"""Measure a few steps with `--bench`: its result, and that it leaves no files."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from launch.cloud.kube.job import expand_train_options
from launch.cloud.kube.job_options import JobOptions
from launch.cloud.kube.raw_text import RawText, list_preparation_steps
from lib.core import paths
from lib.core.errors import UsageError
from lib.train.command_line import parse_options
from lib.train.new_model import model_from_scratch
from lib.train.output.kinds import NAME, BenchKind
from lib.train.sources.table import choose_source
from tests import forks
from tests.conftest import ROOT, free_port, run_stage, start_stage
from tests.test_stage_04_experts import MIXTRAL
from tests.test_stage_04_float8 import allow_float8_anywhere  # noqa: F401 (for `before`)
from tests.training import save_model

STAGE = "04_train_fsdp.py"
SMALL = ("--bench", "--model-size", "1M", "-s", 32, "-b", 1)
DELAY_S = 0.4
_CLONE_NEWNS = 0x20000  # Linux: a new mount namespace
PHASES = ("data", "forward", "backward", "update")


def run_bench(root: Path, *options: object, **settings: Any) -> tuple[dict[str, Any], str]:
    """Return the JSON line and the log of a bench, which must leave the directory as it was."""
    before = sorted(root.rglob("*"))
    done = run_stage(STAGE, *options, cwd=root, **settings)
    assert sorted(root.rglob("*")) == before
    [line] = done.stdout.splitlines()  # standard output has nothing else
    return json.loads(line), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 2, pytest.param(3, marks=pytest.mark.long)])
def test_a_bench_measures_and_leaves_no_files(tmp_path: Path, ranks: int) -> None:
    result, log = run_bench(tmp_path, *SMALL, "--grad-accum-steps", 2, ranks=ranks)
    count = ranks or 1
    assert (result["ranks"], result["nodes"], result["measured_steps"]) == (count, 1, 20)
    assert result["global_batch_size"] == 2 * count
    tokens = result["global_batch_size"] * result["seq_length"]
    seconds = result["time/total"] / 1000
    assert result["perf/tokens_per_sec"] == pytest.approx(tokens / seconds)
    assert not {"perf/mfu", "peak_tflops"} & set(result)  # on a CPU
    assert 0 < sum(result[f"time/{phase}"] for phase in PHASES) <= result["time/total"]
    assert 0 < result["memory/max_peak_gib"] <= result["memory/total_gib"]
    total = result["communication/total"]
    if count == 1:
        assert total is None and "not measured" in log
    else:
        assert 0 < result["communication/exposed"] <= total < 1
        assert f"of gloo, mean of {count} ranks" in log
    for name in ("tokens/s", "time of a step", "  backward", "communication", "memory"):
        assert f"  {name} " in log
    assert "MFU" not in log
    assert "20 steps, measured after 5" in log
    assert "checkpoints    none" in log or "checkpoints      none" in log


def delay_last_rank(_: int) -> None:
    """Let rank 1 begin each forward pass late, so that rank 0 waits for it in a collective."""
    from lib.parallel import parallelize

    begin_pass = parallelize.begin_pass

    def begin_late(*arguments: Any) -> None:
        if os.environ["RANK"] == "1":
            time.sleep(DELAY_S)
        begin_pass(*arguments)

    parallelize.begin_pass = begin_late


@pytest.mark.slow
def test_the_share_of_communication_contains_the_waiting_for_a_late_rank(tmp_path: Path) -> None:
    result, _ = run_bench(tmp_path, *SMALL, ranks=2, before="tests.test_bench:delay_last_rank")
    # Rank 0 waits for the whole delay, and rank 1 does not; the result is the mean of both.
    waiting = DELAY_S / 2 / (result["time/total"] / 1000)
    assert result["time/total"] > 1000 * DELAY_S
    assert waiting < result["communication/exposed"] + 0.05
    assert result["communication/exposed"] <= result["communication/total"] < 0.8


@pytest.mark.slow
def test_options_that_keep_something_have_no_effect(tmp_path: Path) -> None:
    typed = ("-e", "exp", "--ckpt-freq", 1, "--max-steps", 2, "--wandb", "on", "--warmup-steps", 99)
    config = tmp_path / "run.yaml"
    config.write_text("eval-freq: 3\nlog-freq: 1\nmodel-name: org/name\n")
    result, log = run_bench(tmp_path, *SMALL, *typed, "--config", config)
    assert result["measured_steps"] == 20
    note = next(line for line in log.splitlines() if "without effect on --bench" in line)
    assert note.endswith(
        ": --experiment-name, --max-steps, --warmup-steps, --log-freq, --ckpt-freq, --eval-freq, "
        "--wandb, --model-name"
    )


@pytest.mark.slow
def test_an_existing_run_of_that_name_is_left_alone(tmp_path: Path) -> None:
    run = ("-e", "exp", "-d", "synthetic:10K", *SMALL[1:], "--max-steps", 2)
    run_stage(STAGE, *run, cwd=tmp_path)
    before = {
        path: path.read_bytes() for path in (tmp_path / "outputs").rglob("*") if path.is_file()
    }
    run_bench(tmp_path, *run, "--bench", "--overwrite")
    assert all(path.read_bytes() == content for path, content in before.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ("--packing", "documents"),
        pytest.param(("--optimizer", "adamw8bit"), marks=pytest.mark.long),
        pytest.param(("--precision", "fp16"), marks=pytest.mark.long),
        pytest.param(
            ("--activation-checkpointing", "full", "--cpu-offload", "on"), marks=pytest.mark.long
        ),
    ],
    ids=lambda options: options[1],
)
def test_other_settings_are_measured_too(tmp_path: Path, options: tuple[str, ...]) -> None:
    result, _ = run_bench(tmp_path, *SMALL, *options, ranks=2)
    field = options[0].removeprefix("--").replace("-", "_")
    assert result[field] == options[1] and result["perf/tokens_per_sec"] > 0


@pytest.mark.long
def test_eight_bits_are_measured_too(tmp_path: Path) -> None:
    result, _ = run_bench(
        tmp_path,
        *SMALL,
        *("--precision", "fp8"),
        ranks=2,
        before="tests.test_stage_04_float8:allow_float8_anywhere",
    )
    assert result["precision"] == "fp8"


@pytest.mark.slow
def test_no_weights_are_read(project: Path) -> None:
    (project / "model/model.safetensors").write_bytes(b"no weights at all")
    options = ("--bench", "-m", "model", "-s", 32)
    result, log = run_bench(project, *options, ranks=2)
    assert "initialised from seed 0" in log and result["model"] == "model"
    result, log = run_bench(project, *options, "--lora-rank", 4, ranks=2)
    assert "LoRA: adapter initialised" in log and result["lora_rank"] == 4


@pytest.mark.slow
def test_experts_are_measured_from_their_config_alone(tmp_path: Path) -> None:
    save_model(tmp_path / "model", MIXTRAL)
    (tmp_path / "model/model.safetensors").unlink()
    result, log = run_bench(tmp_path, "--bench", "-m", "model", "-s", 32)
    assert "load-balancing loss" in log and result["data"] == "synthetic:100M"


@pytest.mark.slow
def test_prepared_data_is_measured_too(project: Path) -> None:
    run_stage(
        STAGE, "-e", "x", "-d", "corpus", "-m", "model", "-s", 32, "--prepare-only", cwd=project
    )
    result, log = run_bench(project, "--bench", "-d", "corpus", "-m", "model", "-s", 32)
    assert result["data"] == "hf_datasets/corpus" and "validation loss" not in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)]
)
def test_a_signal_ends_a_bench_without_files(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    launch = start_stage(STAGE, *SMALL, "-s", 256, cwd=tmp_path, output=log, ranks=2)
    while "  loss " not in log.read_text():
        assert not launch.poll(0.02)
    launch.signal(number)
    assert launch.wait(120) == [75, 75]
    text = log.read_text()
    assert f"stopped by {signal.Signals(number).name} after step" in text
    assert "a bench saves nothing" in text and "Traceback" not in text and '"model"' not in text
    assert list(tmp_path.iterdir()) == [log]


def enter_read_only(_: int) -> None:
    _enter_file_system("ro")


def enter_full(_: int) -> None:
    _enter_file_system("size=4k,nr_inodes=1")


def _enter_file_system(options: str) -> None:
    """Work in a tmpfs, mounted for this process alone, in which even root cannot write."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        raise OSError("this process may not unshare its mounts")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "place"], check=True)
    os.chdir("place")
    os.environ["HOME"] = "/nonexistent"


@pytest.mark.slow
def test_a_bench_needs_no_writable_directory(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    for enter in (enter_read_only, enter_full):
        before = f"{__name__}:{enter.__name__}"
        done = run_stage(STAGE, *SMALL, cwd=tmp_path, expect=None, before=before)
        if "unshare" in done.stderr or "mount" in done.stderr:
            pytest.skip(f"needs to mount a tmpfs: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1])["ranks"] == 1
    assert not list((tmp_path / "place").iterdir())


def test_without_room_for_temporary_files_the_error_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "missing")])
    config = parse_options(["--bench", "--model-size", "1M"])
    experiment = paths.Experiment(config.save_dir, config.experiment_name)
    with (
        pytest.raises(UsageError, match="temporary files") as caught,
        model_from_scratch(config, experiment, BenchKind, choose_source(config), has_begun=False),
    ):
        pass
    assert "TMPDIR" in caught.value.expected


@pytest.mark.slow
def test_a_launcher_starts_a_bench_on_two_nodes(tmp_path: Path) -> None:
    script = ROOT / "launch/multi_node.sh"
    environment = {**os.environ, **forks.CPU_VARIABLES, "PYTHON": sys.executable}
    run = {"cwd": tmp_path, "env": environment, "text": True, "stdout": subprocess.PIPE}
    several = ["bash", script, "--nnodes", "2", "--nproc-per-node", "1"]
    several += ["--head", "127.0.0.1", "--port", str(free_port())]
    launchers = [
        subprocess.Popen([*several, "--node-rank", str(rank), "--", *map(str, SMALL)], **run)
        for rank in range(2)
    ]
    printed = [launcher.communicate(timeout=300)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * 2, printed
    head, other = printed
    result = read_result(head)
    assert (result["ranks"], result["nodes"]) == (2, 2) and "{" not in other
    assert not list(tmp_path.iterdir())


def read_result(printed: str) -> dict[str, Any]:
    """Return the JSON line among the lines of a launcher."""
    [line] = [line for line in printed.splitlines() if line.startswith("{")]
    return json.loads(line)


def test_a_job_of_a_bench_needs_no_dataset_and_no_name() -> None:
    job = JobOptions(job_name="job", gpus_per_node=8)
    words = ["--bench", "--model-size", "7B"]
    assert expand_train_options(job, words) == words
    alone = parse_options(expand_train_options(job, ["--bench"]))
    assert (alone.model_size, alone.experiment_name) == ("1B", NAME)
    assert alone.dataset_name == ["synthetic:100000000"]
    synthetic = expand_train_options(job, ["-d", "synthetic", "--model-size", "1B"])
    assert "--experiment-name=job" in synthetic
    steps = list_preparation_steps(RawText(), parse_options(synthetic), synthetic)
    assert [step[0] for step in steps] == [STAGE]
    steps = list_preparation_steps(RawText(), parse_options(words), words)
    assert not list(steps)


def test_pods_get_each_option_once_with_the_value_that_counts() -> None:
    job = JobOptions(job_name="job", gpus_per_node=8)
    words = ["-d", "a=1", "-d", "b=1", "--tokenizer=org/name", "--max-steps=56", "--max_steps", "9"]
    pod_words = expand_train_options(job, [*words, "--learning_rate=1", "--lr", "2"])
    assert [word for word in pod_words if "steps" in word] == ["--max-steps"] and "9" in pod_words
    assert pod_words.count("-d") == 2 and "--learning_rate=1" not in pod_words
    assert sum(word.startswith("--tokenizer") for word in pod_words) == 1
    flags = [word.partition("=")[0] for word in pod_words if word.startswith("--")]
    assert len(flags) == len(set(flags)) and parse_options(pod_words).max_steps == 9


def test_the_dry_run_of_a_bench_prints_its_plan(tmp_path: Path) -> None:
    done = run_stage(STAGE, *SMALL, "--dry-run", cwd=tmp_path)
    assert not done.stdout and "28 (" in done.stderr and "nothing was written" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_bench_that_cannot_fit_is_refused(tmp_path: Path) -> None:
    done = run_stage(
        STAGE,
        *SMALL,
        *("--activation-checkpointing", "none"),
        cwd=tmp_path,
        expect=2,
        before="tests.training:offer_little_memory",
    )
    assert "does not fit" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--prepare-only",), "--prepare-only ends before training"),
        (("-d", "synthetic:0"), "is not a number of tokens"),
    ],
)
def test_impossible_options_are_refused(
    tmp_path: Path, options: tuple[object, ...], says: str
) -> None:
    done = run_stage(STAGE, *SMALL, *options, cwd=tmp_path, expect=2)
    assert says in done.stderr and not done.stdout and not list(tmp_path.iterdir())


def test_without_a_model_the_error_says_how_to_name_one(tmp_path: Path) -> None:
    done = run_stage(STAGE, "--bench", cwd=tmp_path, expect=3)
    assert "no model is prepared" in done.stderr and "--model-size" in done.stderr


def test_the_directory_of_a_bench_cannot_exist() -> None:
    config = parse_options(["--bench", "--model-size", "1M"])
    root = paths.Experiment(config.save_dir, config.experiment_name).root
    assert not root.exists() and root.parent.exists()
    with pytest.raises(OSError):
        root.mkdir(parents=True)
    assert config.dataset_name == ["synthetic:100000000"] and config.from_scratch
    assert ROOT.is_dir()
