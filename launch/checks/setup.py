"""Check that this checkout works (framework), and that prepared artifacts are complete (setup).

  python launch/check.py framework           Python, packages, imports, offline guard, a small step
  python launch/check.py setup               datasets, models and token stores in this directory
  python launch/check.py setup --deep        … and the digest of every file

`launch/check.py machine` checks the hardware. Exit codes: 0 ready, 5 a warning (with --fail-on
warning), 6 an error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from launch.bundles import unpacking
from launch.checks import findings
from launch.checks.findings import ERROR, INFO, WARNING, Finding
from lib.core import (
    artifact_checks,
    code_version,
    commands,
    hashing,
    log,
    manifest,
    nvidia,
    options,
)
from lib.core.errors import StageError
from lib.core.paths import MANIFEST
from lib.models import directory, lookup
from lib.parallel import torch_builds
from lib.parallel.torch_builds import Torch, driver_problem
from lib.tokens.dataset import open_dataset

ROOT = Path(__file__).resolve().parents[2]
_TORCH_VERSIONS = (2, 11), (2, 13)
_OPTIONAL_PACKAGES = {
    *("backports-zstd", "gigatoken", "matplotlib", "orjson", "tensorboard", "xxhash")
}
_PIN = re.compile(r'([a-z0-9-]+)==([\w.+]+)(?:; python_version (>=|<) "3\.(\d+)")?')
_TIMEOUT_S = 120

_GUARD = """
from lib.core import offline
offline.enable_offline_mode()
from huggingface_hub import constants
assert constants.HF_HUB_OFFLINE, "huggingface_hub would go online"
"""
_IMPORTS = """
import importlib, pathlib
for path in sorted(pathlib.Path("lib").rglob("*.py")):
    if path.stem != "__main__":
        importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
"""
_STEP = """
import os, tempfile, torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
device = "cuda" if torch.cuda.is_available() else "cpu"
store = "file://" + os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("nccl" if device == "cuda" else "gloo", store, rank=0, world_size=1)
torch.manual_seed(0)
mesh = torch.distributed.init_device_mesh(device, (1,))
model = fully_shard(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1)).to(device),
                    mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
inputs = torch.randn(64, 8, device=device)
losses = []
for _ in range(20):
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2, f"the loss does not fall: {losses}"
print(f"a sharded model learns on {device}: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)
os._exit(0)
"""


def main(argv: list[str]) -> None:
    """Run the check and report its findings. argv: `framework` or `setup`, then the options."""
    check = argv[0]
    parser = options.Parser(__doc__)
    parser.prog = f"check.py {check}"
    parser.add_argument("--deep", action="store_true", help="setup: hash every file")
    parser.add_argument(
        "--cache-dir",
        type=Path,
        default=Path(".cache"),
        metavar="DIR",
        help="directory of models and token stores",
    )
    findings.add_options(parser)
    parser.add_common(workers="hash", overwrite=False)
    opts = parser.parse(argv[1:])
    if opts.dry_run:
        log.info(f"would check the {check} and write nothing")
        return
    findings.report_findings(
        [*(check_framework() if check == "framework" else check_setup(opts))], opts, f"the {check}"
    )


def check_framework() -> Iterator[Finding]:
    """Yield findings about Python, its packages and the code."""
    version = sys.version_info
    is_supported = version.major == 3 and version.minor in torch_builds.PYTHON_MINORS
    yield Finding(
        INFO if is_supported else WARNING,
        "python",
        f"{version[0]}.{version[1]} ({sys.executable})",
        "" if is_supported else f"use Python {torch_builds.PYTHONS}",
    )
    yield from _check_packages()
    yield from _check_code()
    for check, text in (("imports", _IMPORTS), ("offline guard", _GUARD), ("self-test", _STEP)):
        yield _run_python(check, "-c", text)
    for path in sorted(ROOT.glob("0[1-5]_*.py")):
        yield _run_python(path.name, str(path), "--help")


def _check_packages() -> Iterator[Finding]:
    """Compare the installed packages with requirements.txt, or with the list of a wheelhouse."""
    equal = 0
    wheelhouse_list = ROOT / "wheelhouse" / "requirements.txt"
    pin_list = wheelhouse_list if wheelhouse_list.exists() else ROOT / "requirements.txt"
    install = commands.pip_install("-r", commands.path_of("requirements.txt"))
    for name, pinned, comparison, minor in _PIN.findall(pin_list.read_text(encoding="utf-8")):
        if comparison and (sys.version_info.minor >= int(minor)) != (comparison == ">="):
            continue
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(
                WARNING if name in _OPTIONAL_PACKAGES else ERROR,
                name,
                f"not installed; requirements.txt names {pinned}",
                run=install,
            )
            continue
        if pinned in (installed, installed.partition("+")[0]):
            equal += 1
        elif (
            name == "torch"
            and not _TORCH_VERSIONS[0]
            <= tuple(map(int, installed.split(".")[:2]))
            <= _TORCH_VERSIONS[1]
        ):
            yield Finding(
                ERROR,
                name,
                f"{installed}; 2.11 to 2.13 work",
                run=commands.pip_install(f"torch=={pinned}"),
            )
        else:
            yield Finding(WARNING, name, f"{installed} instead of {pinned}", run=install)
    yield Finding(INFO, "packages", f"{equal} have the version of requirements.txt")


def _check_code() -> Iterator[Finding]:
    """Yield which code this is: a commit, or an unpacked bundle, whose files are hashed."""
    stamp = ROOT / unpacking.UNPACKED
    if not stamp.exists():
        commit = code_version.find_git_commit()
        yield Finding(
            INFO,
            "code",
            f"commit {commit}" if commit else "the commit is unknown, since there is no git here",
        )
        return
    content = json.loads(stamp.read_text(encoding="utf-8"))
    files = unpacking.group_by_file(content["files"])
    code_files = {
        name: parts
        for name, parts in files.items()
        if not name.startswith((".cache/", "hf_datasets/", "wheelhouse/"))
    }
    # Only with tiny volumes does a file of code consist of several parts.
    changed = [
        name
        for name, parts in code_files.items()
        if not (ROOT / name).is_file()
        or (len(parts) == 1 and not hashing.has_digest(ROOT / name, parts[0]["digest"]))
    ]
    text = f"commit {content['summary']['commit'][:12]}, unpacked from a bundle"
    yield Finding(
        WARNING if changed else INFO,
        "code",
        text
        + (
            f"; changed since: {', '.join(changed[:5])}"
            if changed
            else f", {len(code_files)} files intact"
        ),
        "unpack the bundle again, unless you have changed them" if changed else "",
    )


def _run_python(check: str, *arguments: str) -> Finding:
    """Run this Python with arguments and return whether that works."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    try:
        process = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return Finding(ERROR, check, f"not finished after {_TIMEOUT_S} s")
    if process.returncode:
        last_line = process.stderr.strip().rpartition("\n")[2]
        return Finding(ERROR, check, last_line or f"exit code {process.returncode}")
    last_line = process.stdout.strip().rpartition("\n")[2]
    return Finding(INFO, check, last_line if check == "self-test" else "works")


def check_setup(opts: options.Options) -> Iterator[Finding]:
    """Yield findings about the GPUs, and about all artifacts prepared in this directory."""
    yield from _check_gpus()
    for path in sorted(Path("hf_datasets").glob("*")):
        if path.is_dir() and not path.name.endswith(".parts") and ".partial-" not in path.name:
            yield _check_dataset(path, opts.deep)
    if not any(Path("hf_datasets").glob(f"*/{MANIFEST}")):
        yield Finding(
            INFO,
            "datasets",
            "none under hf_datasets/",
            "python 02_build_hf_dataset.py --data-folder splits --save-dir hf_datasets/corpus",
        )
    try:
        artifacts = artifact_checks.find_artifacts(
            opts.cache_dir, None, directory.list_strays, lookup.model_remedy
        )
    except StageError as error:
        yield Finding(
            INFO,
            str(opts.cache_dir),
            error.problem,
            "python 03_download_model.py --model-name ORG/NAME",
        )
        return
    if opts.deep:
        artifact_checks.hash_artifacts(artifacts, opts.num_workers, not opts.no_progress)
    for artifact in artifacts:
        wrong = artifact.problems or (
            artifact.content is not None
            and manifest.find_damage(artifact.directory, artifact.content, deep=False)
        )
        yield (
            Finding(
                ERROR,
                str(artifact.place),
                "\n".join(wrong),
                artifact.remedy.get("hint", ""),
                run=artifact.remedy.get("run", ""),
            )
            if wrong
            else Finding(
                INFO, str(artifact.place), "every byte is intact" if opts.deep else "complete"
            )
        )
    for path in artifact_checks.list_unfinished(opts.cache_dir):
        yield Finding(WARNING, str(path), "not finished", "run its stage again")


def _check_gpus() -> Iterator[Finding]:
    """Yield whether the torch of the bundle and the installed torch can use the GPUs here."""
    stamp = ROOT / unpacking.UNPACKED
    driver = nvidia.find_driver()
    summary = json.loads(stamp.read_text(encoding="utf-8"))["summary"] if stamp.exists() else {}
    if driver and (torch_facts := summary.get("torch")):
        torch = Torch(torch_facts["version"].partition("+")[0], torch_facts["cuda"])
        if problem := driver_problem(torch, driver):
            yield Finding(
                ERROR,
                "driver",
                f"{problem} (the torch of this bundle)",
                f"update the driver, or pack again with --driver-version {driver}",
            )
            return
        yield Finding(INFO, "driver", f"{driver} is new enough for torch {torch} of this bundle")
    if not (nvidia.list_names() or nvidia.list_device_files() or nvidia.list_kernel_gpus()):
        return  # torch takes two seconds to import
    from lib.parallel import gpus

    unusable = gpus.find_unusable()
    yield (
        Finding(ERROR, "torch", f"{unusable.problem} ({unusable.found})", unusable.hint)
        if unusable
        else Finding(INFO, "torch", "uses the GPUs of this machine")
    )


def _check_dataset(path: Path, deep: bool) -> Finding:
    try:
        dataset = open_dataset(path)
        if deep:
            dataset.check_content()
    except StageError as error:
        problem = f"{error.problem}\n{error.found}".strip()
        return Finding(ERROR, str(path), problem, error.hint, run=error.run)
    return Finding(INFO, str(path), f"complete: {', '.join(dataset.splits)}")
