# covers: launch/airgap.py, launch/bundles/*.py
"""Test bundles: pack, cut, damage, kill, unpack, install, and train with their contents."""

from __future__ import annotations

import argparse
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.bundles import bundle as bundle_module
from launch.bundles import contents as bundle_contents
from launch.bundles import unpacking, wheelhouse
from lib.core.errors import ArtifactError, UsageError
from lib.parallel.torch_builds import Torch
from lib.tokens import packing, store
from tests.conftest import ROOT, run_stage
from tests.fasttext_models import LANGUAGES, write_classifier
from tests.training import SEQ_LENGTH

GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@localhost")


def check_out(place: Path, **replaced: str) -> Path:
    """Make a repository with one commit of the files here. replaced: new contents, by name.

    Tests and pages are left out, since copying, packing and unpacking them takes most of the time.
    """
    command = [
        *("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        *("--", ".", ":!tests", ":!benchmarks", ":!docs"),
    ]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs git and a checkout: the code is packed as its commit")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, place / name)
    for name, text in replaced.items():
        (place / name).write_text(text)
    for arguments in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*GIT, *arguments], cwd=place, check=True)
    return place


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clean checkout of the current code."""
    return check_out(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def artifacts(prepared_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with hf_datasets/corpus, model/ and the tokens of both."""
    place = tmp_path_factory.mktemp("artifacts")
    shutil.copytree(prepared_once, place, dirs_exist_ok=True)
    run_stage(
        "04_train_fsdp.py",
        "-e",
        "x",
        "-d",
        "corpus",
        "-m",
        "model",
        "-s",
        SEQ_LENGTH,
        "--max-steps",
        2,
        "--prepare-only",
        cwd=place,
    )
    return place


def run_python(
    *command: object, cwd: Path, expect: int = 0, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run a Python script, assert its exit code and return its result."""
    result = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **(env or {})},
    )
    assert result.returncode == expect, (
        f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    )
    assert "Traceback" not in result.stderr
    return result


@pytest.fixture
def pack(checkout: Path, artifacts: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that packs the artifacts into a bundle in the test's directory."""

    def run_pack(*options: object, out: str = "bundle", **settings: object) -> Path:
        run_python(
            checkout / "launch" / "airgap.py",
            "pack",
            "--out",
            tmp_path / out,
            "--no-wheels",
            *options,
            cwd=artifacts,
            **settings,
        )
        return tmp_path / out

    return run_pack


@pytest.fixture(scope="module")
def packed_code(checkout: Path, artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle of the code alone."""
    out = tmp_path_factory.mktemp("code") / "bundle"
    script = checkout / "launch" / "airgap.py"
    run_python(script, "pack", "--out", out, "--no-wheels", cwd=artifacts)
    return out


@pytest.fixture
def bundle(packed_code: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle of the code that a test may change."""
    return shutil.copytree(packed_code, tmp_path / "bundle")


def run_on_far_side(
    bundle: Path, action: str, *options: object, **settings: object
) -> subprocess.CompletedProcess:
    """Run the bundle's own script as on a machine with only Python."""
    return run_python(
        "-I", "-S", bundle / "airgap.py", action, bundle, *options, cwd=bundle.parent, **settings
    )


def read_files(root: Path) -> dict[str, bytes]:
    """Return the contents of all files below a directory, without git's and Python's, by path."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and not {".git", "__pycache__"} & set(path.parts)
    }


def test_unpacked_files_equal_the_packed_ones(
    pack: Callable[..., Path], checkout: Path, artifacts: Path, tmp_path: Path
):
    bundle = pack(
        "--dataset", "corpus", "--model", "model", "--tokens", "corpus", "--volume-size", "100kB"
    )
    volumes = sorted(bundle.glob("volume_*"))
    assert len(volumes) > 3 and any(bundle.glob("volume_*/.parts/**/*"))
    for volume in volumes:
        assert sum(path.stat().st_size for path in volume.rglob("*") if path.is_file()) <= 100_000
    carried = tmp_path / "elsewhere" / "odd name"
    shutil.copytree(bundle, carried)
    assert "every byte is intact" in run_on_far_side(carried, "verify").stdout
    output = run_on_far_side(carried, "unpack", "--to", tmp_path / "a project").stdout
    assert "-d hf_datasets/corpus -m .cache/models/model" in output
    expected = read_files(checkout)
    for source, to in (
        ("hf_datasets/corpus", "hf_datasets/corpus"),
        ("model", ".cache/models/model"),
        (".cache/tokens", ".cache/tokens"),
    ):
        expected |= {f"{to}/{name}": data for name, data in read_files(artifacts / source).items()}
    files = read_files(tmp_path / "a project")
    assert json.loads(files.pop(".bundle.json"))["kind"] == "bundle/1"
    assert files == expected
    assert os.access(tmp_path / "a project" / "launch" / "single_node.sh", os.X_OK)
    assert not os.access(tmp_path / "a project" / "README.md", os.X_OK)


def test_everything_that_stage_04_accepts_can_be_packed(
    checkout: Path, artifacts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Files, links, caches of other programs, mixture weights, and stores by all their names."""
    place = tmp_path / "place"
    dataset = "hf_datasets/corpus"
    shutil.copytree(artifacts, place)
    shard = next((place / dataset / "train").glob("*.arrow"))
    shutil.copy(shard, place / "alone.arrow")
    (place / "cached").mkdir()
    shutil.copy(shard, place / "cached/json-train.arrow")
    (place / "linked").symlink_to("hf_datasets/corpus")
    (place / "link.arrow").symlink_to("alone.arrow")
    shutil.copytree(place / dataset, place / "hf_datasets/org--name")
    blobs = place / "hub/models--org--name/blobs"
    snapshot = f"hub/models--org--name/snapshots/{'a' * 40}"
    shutil.copytree(place / "model", blobs)
    (place / snapshot).mkdir(parents=True)
    (place / "hub/models--org--name/refs").mkdir()
    (place / "hub/models--org--name/refs/main").write_text("a" * 40)
    for path in blobs.iterdir():
        (place / snapshot / path.name).symlink_to(path)
    tokens = next((place / ".cache/tokens").iterdir())
    packs = tokens.with_name(f"{tokens.name}.packs-64")
    shutil.copytree(tokens, packs)
    content = json.loads((packs / "manifest.json").read_text())
    (packs / "manifest.json").write_text(json.dumps(content | {"kind": packing.KIND}))
    (place / "mine").mkdir()
    (place / "mine/task.jsonl").write_text('{"context": "a", "answer": "b"}\n')
    write_classifier(place / "lid.176.ftz", LANGUAGES)
    monkeypatch.setenv("HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.chdir(place)
    of_tokens = {f".cache/tokens/{name}" for name in (tokens.name, packs.name)}
    for option, name, expected in (
        ("--dataset", "alone.arrow", {"hf_datasets/alone.arrow"}),
        ("--dataset", "link.arrow", {"hf_datasets/alone.arrow"}),
        ("--dataset", "cached", {"hf_datasets/cached"}),
        ("--dataset", "linked", {dataset}),
        ("--dataset", "corpus=0.5", {dataset}),
        ("--dataset", "org/name", {"hf_datasets/org--name"}),
        ("--eval-suite", "mine", {".cache/eval/mine"}),
        ("--eval-suite", "small", {".cache/eval/small"}),
        ("--classifier", "lid.176.ftz", {".cache/classifiers/lid.176.ftz"}),
        ("--model", "./model/", {".cache/models/model"}),
        ("--model", "org/name", {".cache/models/org--name"}),
        ("--model", snapshot, {f".cache/models/{'a' * 40}"}),
        *(
            ("--tokens", name, of_tokens)
            for name in (
                "corpus",
                f"{dataset}/",
                "linked",
                "org/name",
                "org--name",
                tokens.name,
                tokens,
                packs.name,
                packs,
            )
        ),
    ):
        opts = bundle_module.parse(["--out", "out", option, str(name)])
        chosen = bundle_contents.find_artifacts(opts)
        assert {part.to for part in chosen} == expected, (option, name)
        for part in chosen:
            assert part.payloads and sum(p.bytes for p in part.payloads), (option, name)
    command = [checkout / "launch/airgap.py", "pack", "--out", "bundle", "--no-wheels"]
    output = run_python(*command, "--dataset", "alone.arrow", "--model", "model", cwd=place).stdout
    assert "hf_datasets/alone.arrow: 0 B" not in output
    output = run_on_far_side(place / "bundle", "unpack", "--to", tmp_path / "project").stdout
    assert "-d hf_datasets/alone.arrow -m .cache/models/model" in output
    assert (tmp_path / "project/hf_datasets/alone.arrow").read_bytes() == shard.read_bytes()
    (place / "empty").mkdir()
    with pytest.raises(ArtifactError, match="no file to pack"):
        bundle_contents.list_directory(place / "empty", "hf_datasets/empty")


def test_links_are_refused_and_hidden_files_stay_behind(tmp_path: Path) -> None:
    model = tmp_path / "cache/models--org--name/snapshots/abc"
    blobs = tmp_path / "cache/models--org--name/blobs"
    for folder in (model / "sub", model / ".git/objects", blobs):
        folder.mkdir(parents=True)
    for path in (tmp_path / "secret", model / ".token", model / ".git/objects/ab", blobs / "4d7a"):
        path.write_text("x")
    (model / "config.json").symlink_to("../../blobs/4d7a")
    (model / "sub/vocab.json").symlink_to("../../../blobs/4d7a")
    (model / ".link").symlink_to(tmp_path / "secret")
    packed = bundle_contents.list_directory(model, "m")
    assert [payload.to for payload in packed.payloads] == ["m/config.json", "m/sub/vocab.json"]
    assert packed.hidden == (".git", ".link", ".token")
    (blobs / "leads_out").symlink_to(tmp_path / "secret")
    for name, target in (
        ("link.json", tmp_path / "secret"),
        ("link.json", "sub/../.token"),
        ("sub/link.json", tmp_path / "missing"),
        ("link", tmp_path),
        ("link.json", blobs / "leads_out"),
    ):
        (model / name).symlink_to(target)
        with pytest.raises(UsageError, match="does not follow links") as caught:
            bundle_contents.list_directory(model, "m")
        assert f"{name} → {target}" in caught.value.found
        (model / name).unlink()
    shutil.copytree(model, tmp_path / "copy", symlinks=True)
    with pytest.raises(UsageError, match="2 links"):  # the blobs are not beside this directory
        bundle_contents.list_directory(tmp_path / "copy", "m")


def test_packing_again_does_nothing_and_other_contents_are_refused(pack: Callable[..., Path]):
    bundle = pack("--dataset", "corpus")
    before = {path: path.stat().st_ino for path in bundle.rglob("*") if path.is_file()}
    stamp = (bundle / "manifest.json").stat().st_mtime_ns
    pack("--dataset", "corpus")
    assert (bundle / "manifest.json").stat().st_mtime_ns == stamp
    pack("--dataset", "corpus", "--model", "model", expect=2)
    pack("--dataset", "corpus", "--model", "model", "--overwrite")
    after = {path: path.stat().st_ino for path in bundle.rglob("*") if path.is_file()}
    metadata = {bundle / "manifest.json", bundle / "airgap.py"}
    assert {path: after[path] for path in before.keys() - metadata} == {
        path: before[path] for path in before.keys() - metadata
    }  # the file was linked, not copied
    assert [path for path in after if path.name == "model.safetensors"]
    run_on_far_side(bundle, "verify")
    assert not list(bundle.parent.glob("bundle.*"))


@pytest.mark.slow
def test_a_killed_pack_continues_with_its_files(checkout: Path, artifacts: Path, tmp_path: Path):
    model = tmp_path / "big"
    shutil.copytree(artifacts / "model", model)
    for number in range(12):
        (model / f"extra_{number:02d}.bin").write_bytes(os.urandom(1 << 20) * 16)
    command = [
        checkout / "launch" / "airgap.py",
        "pack",
        "--out",
        tmp_path / "bundle",
        "--no-wheels",
        "--model",
        model,
        "--num-workers",
        1,
    ]
    process = subprocess.Popen(
        [sys.executable, *map(str, command)], cwd=tmp_path, stdout=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 120
    models = "bundle.partial-*/content*/volume_001/.cache/models"
    while not list(tmp_path.glob(f"{models}/big/extra_03.bin")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "bundle").exists()
    partial = next(tmp_path.glob("bundle.partial-*"))
    inodes = {path.name: path.stat().st_ino for path in partial.rglob("extra_0[0-2].bin")}
    assert len(inodes) == 3
    output = run_python(*command, cwd=tmp_path).stdout
    assert "reused" in output
    models = tmp_path / "bundle" / "volume_001" / ".cache" / "models" / "big"
    assert {name: (models / name).stat().st_ino for name in inodes} == inodes
    run_on_far_side(tmp_path / "bundle", "verify")


def test_each_damaged_file_is_named_and_nothing_is_unpacked(
    pack: Callable[..., Path], tmp_path: Path
):
    bundle = pack("--dataset", "corpus", "--model", "model", "--volume-size", "200kB")
    code = bundle / "volume_001"
    flipped, cut, gone, linked = (
        code / name
        for name in ("README.md", "Makefile", "01_organize_data.py", "02_build_hf_dataset.py")
    )
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 1
    flipped.write_bytes(content)
    cut.write_bytes(cut.read_bytes()[:-1])
    gone.unlink()
    linked.rename(tmp_path / "outside.py")
    linked.symlink_to(tmp_path / "outside.py")
    (code / "torch.py").write_text("import os\n")
    (bundle / "stray").mkdir()
    (bundle / "stray" / "file").touch()
    part = next(path for path in bundle.glob("volume_*/.parts/**/*") if path.is_file())
    part.write_bytes(b"")
    (bundle / "airgap.py").write_text((bundle / "airgap.py").read_text() + "\n")
    for action in (("verify",), ("unpack", "--to", tmp_path / "project")):
        output = run_on_far_side(bundle, *action, expect=3).stderr
        for path, problem in (
            (flipped, "has changed"),
            (cut, "has "),
            (gone, "is missing"),
            (linked, "is not a plain file"),
            (part, "has 0 bytes"),
            (code / "torch.py", "is not part of"),
            (bundle / "stray" / "file", "is not part of"),
            (bundle / "airgap.py", "has "),
        ):
            assert f"{path.relative_to(bundle).as_posix()} {problem}" in output
        assert "8 problems" in output
    assert not list(tmp_path.glob("project*"))
    shutil.rmtree(bundle / "volume_002")
    assert "volume_002/" in run_on_far_side(bundle, "verify", expect=3).stderr


def test_a_path_that_leads_out_is_refused(bundle: Path, tmp_path: Path):
    path = bundle / "manifest.json"
    content = json.loads(path.read_text())
    content["files"][1]["to"] = "lib/other.py"
    path.write_text(json.dumps(content))
    assert "digest" in run_on_far_side(bundle, "verify", expect=3).stderr
    before = sorted(tmp_path.rglob("*"))
    for to, why in (
        ("../evil", "leads out"),
        ("/tmp/evil", "leads out"),
        ("a\0b", "leads out"),
        ("lib/../../evil", "leads out"),
        ("lib//x", "leads out"),
        ("README.md/x", "do not form a file"),
        ("README.md", "do not form a file"),
    ):
        content["files"][1]["to"] = to
        content["summary"]["digest"] = unpacking.content_digest(
            content["files"], content["summary"]
        )
        path.write_text(json.dumps(content))
        output = run_on_far_side(bundle, "unpack", "--to", tmp_path / "project", expect=3).stderr
        assert "manifest.json is damaged" in output and why in output, to
    for deep in ('{"a":' * 100_000, json.dumps(content | {"files": -1})):
        path.write_text(deep)
        output = run_on_far_side(bundle, "verify", expect=3).stderr
        assert "manifest.json is damaged" in output and "Traceback" not in output
    assert sorted(tmp_path.rglob("*")) == before


def test_unpacking_refuses_existing_targets_and_full_disks(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    project = tmp_path / "project"
    run_on_far_side(bundle, "unpack", "--to", project, "--dry-run")
    assert not project.exists()
    project.mkdir()
    digest = unpacking.manifest_digest(bundle)[:8]
    mine = tmp_path / f"project.partial-{digest}" / "mine"
    mine.parent.mkdir()
    mine.touch()
    output = run_on_far_side(bundle, "unpack", "--to", project, expect=2).stderr
    assert "is in the way" in output and mine.exists()
    mine.rename(tmp_path / "mine")
    run_on_far_side(bundle, "unpack", "--to", project)
    assert not mine.parent.exists()
    stamp = (project / "README.md").stat().st_mtime_ns
    (project / "outputs").mkdir()
    assert "already" in run_on_far_side(bundle, "unpack", "--to", project).stdout
    assert (project / "README.md").stat().st_mtime_ns == stamp
    (project / ".bundle.json").unlink()
    assert "not unpacked" in run_on_far_side(bundle, "unpack", "--to", project, expect=2).stderr
    no_wheels = run_on_far_side(
        bundle, "unpack", "--to", tmp_path / "b", "--install", expect=2
    ).stderr
    assert "no wheelhouse" in no_wheels and not (tmp_path / "b").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    assert unpacking.main(["unpack", str(bundle), "--to", str(tmp_path / "c")], "") == 4
    assert "not enough space" in capfd.readouterr().err and not list(tmp_path.glob("c*"))


def test_an_impossible_target_is_refused_before_the_work(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    within = run_on_far_side(bundle, "unpack", "--to", bundle / "project", expect=2).stderr
    assert "inside the bundle" in within
    run_on_far_side(bundle, "verify")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "disk")
    assert unpacking.main(["unpack", str(bundle), "--to", str(tmp_path / "disk")], "") == 2
    assert "mount point" in capfd.readouterr().err and not list(tmp_path.glob("disk.partial*"))


def test_a_bundle_that_may_not_be_read_is_not_called_damaged(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, capfd
):
    opened = Path.open
    for name in ("manifest.json", "README.md"):

        def forbidden(path: Path, *more: Any, name: str = name, **named: Any) -> Any:
            if path.name == name:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
            return opened(path, *more, **named)

        monkeypatch.setattr(Path, "open", forbidden)
        assert unpacking.main(["verify", str(bundle)], "") == 2
        output = capfd.readouterr().err
        assert (
            f"Permission denied: {bundle}" in output and name in output and "damaged" not in output
        )


def test_names_in_a_bundle_do_not_control_the_terminal(bundle: Path):
    (bundle / "a\x1b[31mb\x9bc").touch()
    output = run_on_far_side(bundle, "verify", expect=3).stderr
    assert (
        "a\\x1b[31mb\\x9bc is not part of" in output
        and "\x1b" not in output
        and "\x9b" not in output
    )


@pytest.mark.slow
def test_changes_are_left_out_only_with_an_option(artifacts: Path, tmp_path: Path):
    changed = check_out(tmp_path / "changed")
    command = [changed / "launch" / "airgap.py", "pack", "--out", changed / "out", "--no-wheels"]
    (changed / "an earlier bundle").mkdir()
    (changed / "an earlier bundle/manifest.json").touch()
    (changed / "notes.md").touch()
    run_python(*command, "--dry-run", cwd=artifacts)  # neither file is code
    (changed / "README.md").write_text("changed")
    (changed / "lib" / "new file.py").touch()
    output = run_python(*command, cwd=artifacts, expect=2).stderr
    assert "README.md" in output and "lib/new file.py" in output and not (changed / "out").exists()
    output = run_python(*command, "--allow-dirty", cwd=artifacts).stdout
    assert "not packed" in output
    assert (changed / "out" / "volume_001" / "README.md").read_bytes() == (
        ROOT / "README.md"
    ).read_bytes()
    assert not (changed / "out" / "volume_001" / "lib" / "new file.py").exists()
    summary = json.loads((changed / "out" / "manifest.json").read_text())["summary"]
    assert summary["changed_files_left_behind"] == ["README.md", "lib/new file.py"]


def test_damaged_or_missing_artifacts_are_not_packed(
    checkout: Path, artifacts: Path, tmp_path: Path
):
    place = tmp_path / "artifacts"
    shutil.copytree(artifacts, place)
    command = [checkout / "launch" / "airgap.py", "pack", "--out", "bundle", "--no-wheels"]
    output = run_python(
        *command,
        "--dataset",
        "nothing",
        "--model",
        "none",
        "--tokens",
        "neither",
        cwd=place,
        expect=3,
    ).stderr
    assert (
        "3 problems" in output and "nothing" in output and "none" in output and "neither" in output
    )
    output = run_python(*command, "--tokens", "corpus", cwd=place).stdout
    assert "needs both" in output
    shard = next((place / "hf_datasets" / "corpus" / "train").glob("*.arrow"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    output = run_python(*command, "--dataset", "corpus", "--overwrite", cwd=place, expect=3).stderr
    assert f"{shard} has changed" in output
    assert (place / "bundle" / "airgap.py").exists()  # the earlier bundle is unchanged
    assert not (place / "bundle" / "volume_001" / "hf_datasets").exists()


def make_wheel(
    place: Path, name: str, version: str, *needs: str, tag: str = "py3-none-any"
) -> None:
    """Write a wheel with one module that contains its version."""
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {n}" for n in needs)]
    members = {
        f"{module}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": "\n".join(["Metadata-Version: 2.1", *metadata, ""]),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        f"Tag: {tag}\n",
    }
    record = "".join(f"{path},,\n" for path in [*members, f"{info}/RECORD"])
    with zipfile.ZipFile(place / f"{module}-{version}-{tag}.whl", "w") as wheel:
        for path, text in {**members, f"{info}/RECORD": record}.items():
            wheel.writestr(path, text)


@pytest.fixture
def index(tmp_path: Path) -> dict[str, str]:
    """Return the environment in which pip finds only a few small wheels."""
    import ensurepip

    place = tmp_path / "index"
    place.mkdir()
    wheels = list((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if not wheels:
        pytest.skip("this Python has no wheel of pip (python3-venv brings it on Debian)")
    shutil.copy(wheels[0], place)
    make_wheel(
        place,
        "alpha",
        "1.0",
        'before-eleven; python_version < "3.11"',
        'for-arm; platform_machine == "aarch64"',
        "compiled",
    )
    make_wheel(place, "before-eleven", "1.0")
    make_wheel(place, "for-arm", "1.0")
    for tag in (
        "py3-none-manylinux_2_17_x86_64",
        "py3-none-manylinux2014_aarch64",
        "py3-none-manylinux_2_99_x86_64",
    ):
        make_wheel(place, "compiled", "2.0" if "99" in tag else "1.0", tag=tag)
    return {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(place),
        "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": "",
    }


@pytest.mark.slow
def test_wheels_fit_the_far_side(artifacts: Path, tmp_path: Path, index: dict[str, str]):
    """Also markers, which pip alone would evaluate for its own interpreter."""
    small = check_out(tmp_path / "small", **{"requirements.txt": "alpha==1.0\n"})
    command = [small / "launch" / "airgap.py", "pack", "--cache-dir", tmp_path / "cache", "--out"]
    bundle = tmp_path / "arm"
    run_python(
        *command,
        bundle,
        "--python",
        "3.10",
        "--platform",
        "manylinux_2_28_aarch64",
        cwd=artifacts,
        env=index,
    )
    names = {path.name.partition("-")[0] for path in bundle.rglob("*.whl")}
    assert names == {"alpha", "before_eleven", "for_arm", "compiled", "pip"}
    assert list(bundle.rglob("compiled-1.0-*aarch64.whl"))
    output = run_on_far_side(bundle, "unpack", "--to", tmp_path / "p", "--install", expect=2).stderr
    assert "Python 3.10, aarch64" in output and not (tmp_path / "p").exists()
    output = run_python(
        *command,
        tmp_path / "none",
        "--platform",
        "manylinux_2_5_x86_64",
        cwd=artifacts,
        env=index,
        expect=2,
    ).stderr
    assert "set of wheels" in output and "compiled" in output
    assert not list(tmp_path.glob("none*"))
    run_python(*command, tmp_path / "none", "--platform", "win_amd64", cwd=artifacts, expect=2)
    output = run_python(
        *command, tmp_path / "none", "--no-wheels", "--cuda", "cu126", cwd=artifacts, expect=2
    ).stderr
    assert "--no-wheels packs none" in output


BACKEND = """
import zipfile

def build_wheel(place, config_settings=None, metadata_directory=None):
    name, info = "source_only-1.0-py3-none-any.whl", "source_only-1.0.dist-info"
    with zipfile.ZipFile(f"{place}/{name}", "w") as wheel:
        wheel.writestr("source_only.py", "")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\\nName: source-only\\n"
                                           "Version: 1.0\\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\n"
                                        "Tag: py3-none-any\\n")
        wheel.writestr(f"{info}/RECORD", "")
    return name
"""


def make_source(place: Path) -> None:
    """Write a package that exists only as source and has its own build backend."""
    with tarfile.open(place / "source_only-1.0.tar.gz", "w:gz") as archive:
        for name, text in (
            (
                "pyproject.toml",
                '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            ),
            ("PKG-INFO", "Metadata-Version: 2.1\nName: source-only\nVersion: 1.0\n"),
            ("backend.py", BACKEND),
        ):
            member = tarfile.TarInfo(f"source_only-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


@pytest.mark.slow
def test_torch_fits_the_driver_of_the_far_side(
    tmp_path: Path,
    index: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """If there is no such build, an older torch is packed; the wheelhouse's list names it."""
    for name, value in index.items():
        monkeypatch.setenv(name, value)
    wheels = tmp_path / "index"
    expected = wheelhouse.parse_target("3.11", "manylinux_2_28_x86_64")
    make_wheel(wheels, "torch", "2.12.1+cu126")

    def prepared(cuda: str, driver: str) -> tuple[str, str]:
        lists = {"requirements.txt": b"# pins\ntorch==2.13.0\n"}
        builds = wheelhouse.choose_builds(lists, cuda, driver)
        place = wheelhouse.prepare_wheelhouse(tmp_path / "cache", lists, expected, builds)
        return str(wheelhouse.find_torch(place)), (place / "requirements.txt").read_text()

    assert prepared("", "535") == ("2.12.1+cu126", "# pins\ntorch==2.12.1+cu126\n")
    assert "no torch==2.13.0+cu126" in caplog.text
    assert not list((tmp_path / "cache" / "wheelhouse").glob("*.partial-*"))
    make_wheel(wheels, "torch", "2.13.0", 'cuda-toolkit[cublas]==13.0.3; os_name == "nt"')
    assert prepared("", "580.65.06") == ("2.13.0+cu130", "# pins\ntorch==2.13.0\n")
    with pytest.raises(UsageError, match=r"finds no torch==2\.11\.0\+cu128") as absent:
        prepared("12.8", "")  # no newer torch is built for this driver
    assert "PIP_EXTRA_INDEX_URL" in absent.value.hint
    with pytest.raises(UsageError, match=r"torch 2\.13\.0\+cu132"):
        make_wheel(wheels, "torch", "2.13.0+cu132")
        shutil.rmtree(tmp_path / "cache")
        prepared("13.0", "")
    for cuda, driver, why in (
        ("", "470", "runs with driver 470"),
        ("13.0", "535", "built for CUDA 13.0 and runs with driver 535"),
    ):
        with pytest.raises(UsageError, match=why):
            prepared(cuda, driver)


def fake_driver(folder: Path, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make nvidia-smi print a driver, or "" as on a machine without GPUs."""
    folder.mkdir(exist_ok=True)
    output = f"echo {version}" if version else "echo No devices were found; exit 6"
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{output}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize("cuda", ["12.6", "12.8", "13.0", ""])
def test_a_build_without_code_for_blackwell_is_reported(
    cuda: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "pipeline")
    printed = bundle_module._describe_torch(Torch("2.11.0", cuda))
    assert printed == {
        "version": f"2.11.0{Torch('2.11.0', cuda).local}",
        "cuda": cuda,
        "driver": {"": "", "13.0": "580"}.get(cuda, "525"),
    }
    assert ("--cuda cu128" in caplog.text) == (cuda == "12.6")


@pytest.mark.slow
@pytest.mark.skipif(unpacking.platform.libc_ver()[0] != "glibc", reason="wheels for glibc")
def test_a_bundle_names_the_driver_of_its_torch_and_optional_packages(
    artifacts: Path,
    tmp_path: Path,
    index: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
):
    make_source(tmp_path / "index")
    for name, needs in (("torch", ('cuda-toolkit==13.0.3; os_name == "nt"',)), ("extra", ())):
        make_wheel(tmp_path / "index", name, "2.13.0", *needs)
    small = check_out(
        tmp_path / "small",
        **{
            "requirements.txt": "torch==2.13.0\n",
            "requirements-optional.txt": "extra==2.13.0\nsource-only==1.0\n",
        },
    )
    bundle = tmp_path / "bundle"
    result = run_python(
        small / "launch" / "airgap.py",
        "pack",
        "--out",
        bundle,
        "--optional",
        "--cache-dir",
        tmp_path / "cache",
        "--platform",
        f"manylinux_2_17_{unpacking.platform.machine()}",
        cwd=artifacts,
        env=index,
    )
    assert (
        "torch 2.13.0+cu130, for NVIDIA driver 580 or newer on the far side (--dr" in result.stdout
    )
    assert "source-only==1.0" in result.stdout
    for name in ("extra-*.whl", "source_only-1.0-py3-none-any.whl", "requirements-optional.txt"):
        assert list((bundle / "volume_001" / "wheelhouse").glob(name)), name
    assert json.loads((bundle / "manifest.json").read_text())["summary"]["torch"] == {
        "version": "2.13.0+cu130",
        "cuda": "13.0",
        "driver": "580",
    }
    words = ["unpack", str(bundle), "--to", str(tmp_path / "p"), "--dry-run"]
    for driver, more, code in (
        ("535.104.05", ["--install"], 2),
        ("535.104.05", [], 0),
        ("580.65.06", ["--install"], 0),
        ("", ["--install"], 0),
    ):
        fake_driver(tmp_path / "bin", driver, monkeypatch)
        assert unpacking.main([*words, *more], "") == code, driver
        out, err = capfd.readouterr()
        assert "2.13.0+cu130" in out + err and "NVIDIA driver 580 or newer" in out + err
        assert ("--driver-version 535.104.05" in err) == (code == 2)


@pytest.mark.slow
@pytest.mark.skipif(unpacking.platform.libc_ver()[0] != "glibc", reason="wheels for glibc")
def test_wheels_are_installed_without_a_network(
    artifacts: Path, tmp_path: Path, index: dict[str, str]
):
    machine = unpacking.platform.machine()
    small = check_out(tmp_path / "small", **{"requirements.txt": "alpha==1.0\n"})
    bundle = tmp_path / "bundle"
    command = [
        small / "launch" / "airgap.py",
        "pack",
        "--out",
        bundle,
        "--cache-dir",
        tmp_path / "cache",
        "--platform",
        f"manylinux_2_17_{machine}",
    ]
    run_python(*command, cwd=artifacts, env=index)
    shutil.rmtree(tmp_path / "index")
    project = tmp_path / "project"
    run_on_far_side(bundle, "unpack", "--to", project, "--install")
    result = subprocess.run(
        [
            project / ".venv" / "bin" / "python",
            "-c",
            "import alpha, compiled; print(alpha.VERSION, compiled.VERSION)",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.split() == ["1.0", "1.0"]
    assert (
        "installed already"
        in run_on_far_side(bundle, "unpack", "--to", project, "--install").stdout
    )
    shutil.rmtree(tmp_path / "cache")
    assert "already done" in run_python(*command, cwd=artifacts, env=index).stdout


def isolate_network() -> list[str]:
    """Return a command prefix that leaves a command only its own loopback interface."""
    for flags in (["--net"], ["--net", "--map-root-user"]):
        try:
            if subprocess.run(["unshare", *flags, "true"], capture_output=True).returncode == 0:
                return ["unshare", *flags, sys.executable, "-c", LOOPBACK_UP]
        except FileNotFoundError:
            break
    pytest.skip("network namespaces (unshare --net) are not permitted here")


LOOPBACK_UP = """
import fcntl, os, socket, struct, sys
request = struct.pack("16sH14x", b"lo", 0x41)  # IFF_UP | IFF_RUNNING
fcntl.ioctl(socket.socket(), 0x8914, request)  # SIOCSIFFLAGS
try:
    socket.create_connection(("192.0.2.1", 80), timeout=5)
except OSError as error:
    assert error.errno == 101, error  # network is unreachable
else:
    sys.exit("there is a network here")
os.execvp(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.long
def test_a_bundle_installs_and_trains_without_a_network(
    checkout: Path, artifacts: Path, tmp_path: Path
):
    """This uses the real wheels of requirements.txt, a new directory, and no interface but lo."""
    alone = isolate_network()
    result = subprocess.run(
        [
            sys.executable,
            checkout / "launch" / "airgap.py",
            "pack",
            "--out",
            tmp_path / "bundle",
            "--dataset",
            "corpus",
            "--model",
            "model",
        ],
        cwd=artifacts,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": ""},
    )  # the only step that may use a network
    if "no complete set of wheels" in result.stderr:
        pytest.skip(f"the wheels of requirements.txt cannot be had here:\n{result.stderr}")
    assert result.returncode == 0, result.stderr
    shutil.move(tmp_path / "bundle", tmp_path / "carried")
    project = tmp_path / "project"

    def offline(*command: object) -> str:
        ended = subprocess.run(
            [*alone, *map(str, command)],
            capture_output=True,
            text=True,
            timeout=900,
            cwd=project if project.exists() else tmp_path,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(tmp_path),
                "OMP_NUM_THREADS": "1",
                "CUDA_VISIBLE_DEVICES": "-1",
            },
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout[-3000:]}\n{ended.stderr[-3000:]}"
        return ended.stdout

    offline(
        sys.executable,
        tmp_path / "carried" / "airgap.py",
        "unpack",
        tmp_path / "carried",
        "--to",
        project,
        "--install",
    )
    offline(
        project / ".venv" / "bin" / "torchrun",
        "--standalone",
        "--nproc-per-node",
        2,
        "04_train_fsdp.py",
        "-e",
        "far",
        "-d",
        "corpus",
        "-m",
        ".cache/models/model",
        "-s",
        SEQ_LENGTH,
        "--max-steps",
        3,
        "--log-freq",
        1,
    )
    offline(project / ".venv" / "bin" / "python", "05_export_checkpoint.py", "-e", "far")
    state = json.loads((project / "outputs" / "far" / "state.json").read_text())
    assert (state["status"], state["step"]) == ("complete", 3)
    assert (project / "outputs" / "far" / "export" / "step_00000003" / "model.safetensors").exists()


def test_the_digest_of_the_manifest_identifies_the_bundle(bundle: Path):
    digest = hashlib.sha256((bundle / "manifest.json").read_bytes()).hexdigest()
    assert digest in run_on_far_side(bundle, "verify").stdout
    entries = json.loads((bundle / "manifest.json").read_text())["files"]
    assert {
        f"sha256:{hashlib.sha256((bundle / e['path']).read_bytes()).hexdigest()}" for e in entries
    } == {e["digest"] for e in entries}


def empty_store(place: Path, identity: dict[str, object]) -> Path:
    """Return a token store without files."""
    place.mkdir(parents=True)
    (place / "manifest.json").write_text(
        json.dumps({"kind": store.KIND, "summary": {}, "identity": identity, "files": []})
    )
    return place


@pytest.mark.parametrize("identity", [{}, {"inputs": [1]}, {"inputs": {"dataset": [1]}}])
def test_stores_without_inputs_do_not_belong_to_the_dataset(
    tmp_path: Path, identity: dict[str, object]
) -> None:
    cache = tmp_path / ".cache"
    place = empty_store(cache / "tokens" / "other-1", identity)
    with pytest.raises(ArtifactError, match="no token store"):
        bundle_contents._find_tokens("corpus", cache)
    chosen = bundle_contents.list_directory(place, ".cache/tokens/other-1")
    [line] = bundle_contents.describe_missing(argparse.Namespace(cache_dir=cache), [chosen])
    assert "not packed" in line


def test_the_current_directory_can_name_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = empty_store(tmp_path / ".cache" / "tokens" / "corpus-1", {"inputs": {}})
    (place / "train").mkdir()
    for directory, name in ((place, "."), (place / "train", "..")):
        monkeypatch.chdir(directory)
        [part] = bundle_contents._find_tokens(name, Path(".cache"))
        assert part.to == ".cache/tokens/corpus-1"


def test_a_dataset_with_a_weight_names_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("corpus-1", "a=b-1"):
        empty_store(Path(".cache", "tokens", name), {"inputs": {}})
    for argument, name in (("corpus=0.5", "corpus-1"), ("a=b", "a=b-1"), ("a=b=2", "a=b-1")):
        [part] = bundle_contents._find_tokens(argument, Path(".cache"))
        assert part.to == f".cache/tokens/{name}"


def test_the_command_for_a_file_of_a_dataset_names_the_dataset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = Path("saved/train/state.json")
    file.parent.mkdir(parents=True)
    file.write_text("{}")
    monkeypatch.setattr("sys.argv", ["airgap.py", "pack", "--out", "b", "--dataset", str(file)])
    with pytest.raises(UsageError, match="is a file") as caught:
        bundle_contents._find_dataset(str(file))
    assert caught.value.run.endswith("pack --out b --dataset saved/train")
    (words := Path("words")).mkdir()
    (words / "a.txt").write_text("words")
    monkeypatch.setattr("sys.argv", ["airgap.py", "pack", "--dataset", "words/a.txt"])
    with pytest.raises(UsageError, match="is a file") as caught:
        bundle_contents._find_dataset("words/a.txt")
    assert caught.value.run.splitlines()[2].endswith("pack --dataset hf_datasets/a")
