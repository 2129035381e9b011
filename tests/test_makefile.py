# covers: Makefile, AGENTS.md
"""Test the targets of the Makefile in a directory with the code and an environment."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from launch.checks import setup as setup_check
from launch.cloud.images import versions
from lib.parallel import torch_builds
from tests.conftest import ROOT
from tests.make_targets import make_target, person_environment
from tests.training import write_corpus

VERBS = (
    "demo",
    "demo-chat",
    "test",
    "test-slow",
    "test-cloud",
    "test-long",
    "test-faults",
    "validate-framework",
    "validate-setup",
    "test-quick",
    "run",
    "logs-follow",
    "status",
    "stop",
    "bench",
    "lint",
    "gpu-kit",
    "test-gpu",
    "bench-gpu",
)
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def test_every_target_exists_and_is_described_in_the_head(place: Path):
    text = (place / "Makefile").read_text()
    head = text[: text.index("\n\n")]
    assert all(line.startswith("#") for line in head.splitlines())
    for verb in VERBS:
        assert f"make {verb} " in head, verb
        assert make_target(place, "-n", verb), verb
    # If the hardware lacks a dtype, forcing it takes many times as long.
    for recipe in ("Makefile", *(f"benchmarks/{path.name}" for path in BENCHMARKS.glob("*.py"))):
        assert "--precision" not in (ROOT / recipe).read_text(), recipe
    variables = set(re.findall(r"^(\w+) \?=", text, re.MULTILINE)) - {"LAUNCHER"}
    assert not [name for name in variables if f"{name}=" not in head and f"{name}," not in head]


def test_make_alone_prints_the_targets(place: Path):
    output = make_target(place)
    assert all(f"make {verb} " in output for verb in VERBS) and "EXP=exp" in output
    assert "#" not in output and ":=" not in output


def test_a_run_is_a_name_or_its_directory(place: Path):
    for verb, command in (
        ("status", "monitor.py outputs/e --once"),
        ("stop", "stop.py outputs/e"),
        ("logs-follow", "monitor.py outputs/e --log"),
    ):
        for spelled in ("e", "outputs/e", "outputs/e/"):
            assert command in make_target(place, "-n", verb, f"EXP={spelled}")
    assert "--job-name e " in make_target(place, "-n", "run", "LAUNCHER=slurm", "EXP=outputs/e/")


def test_each_launcher_is_started_with_the_options_of_the_run(place: Path):
    run = ("-n", "run", "EXP=e", "DATASET=hf_datasets/c", "ARGS=--max-steps 9")
    training = "-e e -d hf_datasets/c"
    assert f"launch/single_node.sh  -- {training}  --max-steps 9" in make_target(place, *run)
    assert f"--nproc-per-node 2 -- {training} -m org/m" in make_target(
        place, *run, "NPROC=2", "MODEL=org/m"
    )
    output = make_target(place, *run, "LAUNCHER=slurm", "NODES=4", "SBATCH=--partition=gpu")
    assert f"sbatch -N 4 --job-name e --partition=gpu launch/slurm.sbatch {training}" in output
    output = make_target(place, *run, "LAUNCHER=kubernetes", "NODES=2", "INSTANCE_TYPE=t")
    assert (
        "launch/kubernetes.py apply --kind pytorchjob --job-name e --nodes 2 "
        "--instance-type t" in " ".join(output.replace("\\\n", " ").split())
    )
    assert f" -- {training}" in output
    assert 'not "ssh"' in make_target(place, *run, "LAUNCHER=ssh", expect=2)
    for launcher in ("slurm", "kubernetes"):
        finish = make_target(place, "-n", "test-quick", f"LAUNCHER={launcher}")
        assert (
            "sbatch -N 1 --job-name test-quick  --wait"
            if launcher == "slurm"
            else "launch/kubernetes.py deploy"
        ) in finish


def test_setups_are_checked_where_the_data_are(place: Path) -> None:
    kubernetes = make_target(
        place, "-n", "validate-setup", "LAUNCHER=kubernetes", "KUBERNETES=--pvc p"
    )
    assert "kubernetes.py validate" in kubernetes
    assert "--pvc p --gpus-per-node 0 -- python launch/check.py setup" in kubernetes
    slurm = make_target(place, "-n", "validate-setup", "LAUNCHER=slurm", "NODES=4", "SBATCH=-p gpu")
    assert "check.py slurm --nodes 4 -- -p gpu" in slurm and "check.py setup" in slurm
    assert "check.py machine" in make_target(place, "-n", "validate-setup")


def test_the_local_launcher_accepts_the_options_of_make(place: Path):
    command = make_target(place, "-n", "run", "NPROC=3", "ARGS=--max-steps 9").strip()
    command = command.replace(" -- ", " --dry-run -- ")
    result = subprocess.run(["bash", "-c", command], cwd=place, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "--nproc-per-node 3" in result.stdout + result.stderr
    assert "-e exp -d hf_datasets/corpus --max-steps 9" in result.stdout + result.stderr


@pytest.mark.parametrize("verb", ["run", "status", "logs-follow", "stop"])
def test_pods_accept_the_options_of_make(place: Path, verb: str):
    command = make_target(
        place,
        "-n",
        verb,
        "LAUNCHER=kubernetes",
        "INSTANCE_TYPE=p5.48xlarge",
        "KUBERNETES=--image registry/train:1 --dry-run",
    ).strip()
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=place,
        capture_output=True,
        text=True,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
    output = result.stdout + result.stderr
    assert result.returncode == 0 and output and "error" not in output, output


def test_make_shows_the_status_and_log_of_a_run_and_stops_it(place: Path):
    assert "there is no run" in make_target(place, "status", expect=2)
    assert "there is no run" in make_target(place, "stop", expect=2)
    assert "there is no run" in make_target(place, "logs-follow", expect=2)
    run = place / "outputs" / "exp"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "rank_00000.log").write_text("a line\n")
    (run / "state.json").write_text(
        json.dumps({"status": "preempted", "step": 3, "total_steps": 9})
    )
    assert "preempted" in make_target(place, "status")
    assert "nothing to stop" in make_target(place, "stop") and not (run / "stop").exists()
    process = subprocess.Popen(
        ["make", "logs-follow"],
        cwd=place,
        env=person_environment(),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "a line\n"
        with (run / "logs" / "rank_00000.log").open("a") as file:
            file.write("one more\n")
        assert process.stdout.readline() == "one more\n"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_bench_runs_all_and_ends_at_the_first_failure(place: Path):
    (place / "benchmarks").mkdir()
    for name, code in (("a", "print('first')"), ("b", "raise SystemExit(4)"), ("c", "print('no')")):
        (place / "benchmarks" / f"{name}.py").write_text(code)
    output = make_target(place, "bench", expect=2)
    assert "first" in output and "b.py" in output and "no\n" not in output
    (place / "benchmarks" / "b.py").unlink()
    assert "first" in (output := make_target(place, "bench")) and "no\n" in output


def test_packages_come_from_a_wheelhouse(place: Path):
    assert "--no-index" not in make_target(place, "-n", "demo", "-B")
    (place / "wheelhouse").mkdir()
    assert "--no-index --find-links wheelhouse -r requirements.txt" in make_target(
        place, "-n", "demo", "-B"
    )
    (place / "wheelhouse" / "requirements.txt").touch()  # this list may name another build of torch
    assert "--find-links wheelhouse -r wheelhouse/requirements.txt" in make_target(
        place, "-n", "demo", "-B"
    )


def test_another_python_is_refused_with_one_that_is_installed(place: Path, tmp_path: Path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")  # `sys.exit(True)`
    new = tmp_path / "python3.14"
    new.write_text("#!/bin/sh\nexit 0\n")
    for path in (old, new):
        path.chmod(0o755)
    tools = {name: shutil.which(name) for name in ("make", "sh", "sed", "touch")}
    for name, target in tools.items():
        (tmp_path / name).symlink_to(target)
    result = subprocess.run(
        ["make", "demo", f"PYTHON={old}", "VENV=absent"],
        cwd=place,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "make demo PYTHON=python3.14" in result.stdout
    assert not (place / "absent").exists()


def test_all_places_name_the_supported_pythons():
    for name in ("README.md", "CONTRIBUTING.md", "docs/tutorials/airgap.md", "Makefile"):
        assert f"Python {torch_builds.PYTHONS}" in (ROOT / name).read_text(), name
    assert [f"3.{minor}" for minor in torch_builds.PYTHON_MINORS] == list(versions.PYTHONS)


def check_setup(place: Path, *options: str, expect: int) -> str:
    """Run the check of prepared artifacts and return its output."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "launch" / "check.py"), "setup", *options],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == expect, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout + result.stderr


def test_prepared_artifacts_are_checked(project: Path):
    from tests.conftest import run_stage

    run_stage(
        "03_download_model.py",
        "--from-scratch",
        "--model-size",
        "tiny",
        "--model-name",
        "small",
        "--tokenizer",
        "model",
        cwd=project,
    )
    output = check_setup(project, "--deep", expect=0)
    assert "hf_datasets/corpus: complete: train, validation" in output
    assert ".cache/models/small: every byte is intact" in output
    config = project / ".cache" / "models" / "small" / "config.json"
    config.write_text(config.read_text().replace("0", "1", 1))
    check_setup(project, expect=0)  # the sizes are the same
    output = check_setup(project, "--deep", "--json", "found.json", expect=6)
    assert f"{config.relative_to(project)} has other content" in output and "--overwrite" in output
    findings = json.loads((project / "found.json").read_text())["findings"]
    output = check_setup(project, "--deep", "--json", "found.json/x", expect=2)
    assert "found.json is a file" in output and "other content" not in output  # before the work
    assert [f["check"] for f in findings if f["severity"] == "error"] == [".cache/models/small"]
    next((project / "hf_datasets" / "corpus" / "train").glob("*.arrow")).unlink()
    assert "hf_datasets/corpus" in check_setup(project, expect=6)


def test_gpus_that_torch_cannot_use_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\ncase $* in *=name*) echo NVIDIA A100;; *) echo 535.104.05;; esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # also if torch could use them
    output = check_setup(tmp_path, expect=6)
    assert "torch cannot use" in output
    assert "1 GPU (NVIDIA A100), driver 535.104.05" in output


def test_nothing_prepared_is_no_error(tmp_path: Path):
    output = check_setup(tmp_path, expect=0)
    assert "none under hf_datasets/" in output and "01" not in output


def test_versions_are_compared_with_the_pins(monkeypatch: pytest.MonkeyPatch):
    real = setup_check.metadata.version
    versions = {"torch": "2.9.1", "tqdm": "4.0", "datasets": None}

    def version(name: str) -> str:
        if versions.get(name, "") is None:
            raise setup_check.metadata.PackageNotFoundError
        return versions.get(name) or real(name)

    monkeypatch.setattr(setup_check.metadata, "version", version)
    findings = {f.check: f for f in setup_check._check_packages()}
    assert findings["torch"].severity == "error" and "2.11 to 2.13" in findings["torch"].text
    assert findings["datasets"].severity == "error" and "not installed" in findings["datasets"].text
    assert findings["tqdm"].severity == "warning" and "4.0 instead of" in findings["tqdm"].text


@pytest.mark.long
def test_validate_framework_checks_the_checkout(place: Path, tmp_path: Path):
    output = make_target(place, "validate-framework")
    for check in (
        "imports: works",
        "offline guard: works",
        "a sharded model learns on cpu",
        "04_train_fsdp.py: works",
        "the framework is ready",
    ):
        assert check in output
    broken = tmp_path / "broken"
    shutil.copytree(ROOT / "lib", broken / "lib")
    shutil.copytree(ROOT / "launch", broken / "launch")
    shutil.copy(ROOT / "requirements.txt", broken)
    (broken / "lib" / "core" / "units.py").write_text("import nothing_of_this_name\n")
    result = subprocess.run(
        [sys.executable, str(broken / "launch" / "check.py"), "framework"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert result.returncode not in (0, 5)
    assert "nothing_of_this_name" in result.stdout + result.stderr


@pytest.mark.long
def test_quick_run_from_raw_text_to_an_export(place: Path):
    """It ignores leftovers of an earlier run, and validate-setup checks its artifacts."""
    (place / "outputs" / "test-quick" / "checkpoints" / "step_00000500").mkdir(parents=True)
    write_corpus(place / "splits_test-quick")
    output = make_target(place, "test-quick")
    assert "test-quick    complete" in output and "exported model" in output
    assert (place / "outputs" / "test-quick" / "export" / "final" / "config.json").exists()
    assert "step 20 of 20" in make_target(place, "status", "EXP=test-quick")
    output = make_target(place, "validate-setup")
    assert (
        "hf_datasets/test-quick: complete" in output
        and ".cache/models/test-quick: complete" in output
    )


def test_a_missing_package_is_an_error_only_if_it_is_required(
    monkeypatch: pytest.MonkeyPatch,
):
    """docs/explanation/dependencies.md says what happens without each package."""

    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(setup_check.metadata, "version", absent)
    severities = {finding.check: finding.severity for finding in setup_check._check_packages()}
    table = (
        (ROOT / "docs" / "explanation" / "dependencies.md")
        .read_text()
        .partition("requirements-optional")[0]
    )
    needed = {
        name
        for names, without in re.findall(r"^\| ([\w, -]+) \|.*\| ([^|]*) \|$", table, re.MULTILINE)
        for name in names.split(", ")
        if "need" in without
    }
    for name, severity in severities.items():
        if name != "packages":
            assert severity == ("error" if name in needed else "warning"), name


def test_what_the_page_for_agents_shows_can_be_typed() -> None:
    text = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
    [lines] = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    typed = [*lines.splitlines(), *re.findall(r"`((?:make|\.venv/bin/python) [^`]+)`", text)]
    assert len(typed) > 5
    for line in typed:
        command = line.replace("make ", "make --dry-run ").replace(
            "pytest", "pytest --collect-only"
        )
        command = command.replace(".venv/bin/python", sys.executable)
        subprocess.run(
            ["bash", "-ec", command],
            check=True,
            cwd=ROOT,
            env=person_environment(),
            stdout=subprocess.DEVNULL,
        )
