"""Choose the contents of an air-gap bundle, and their paths in the project on the far side."""

from __future__ import annotations

import io
import os
import shlex
import subprocess
import tarfile
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from lib.core import hashing, manifest, paths, units
from lib.core.artifacts import tokenizer_fingerprint
from lib.core.errors import ArtifactError, Problems, StageError, UsageError
from lib.core.options import Options
from lib.core.paths import MANIFEST
from lib.curate.classify import model_file
from lib.evaluate import tasks
from lib.models import lookup
from lib.tokens import mixture, packing, store
from lib.tokens.dataset import find_dataset, open_dataset

_ROOT = Path(__file__).resolve().parents[2]
_CODE_DIRECTORIES = ("lib", "launch", "tests", "benchmarks")
_UNFINISHED = ".partial-"
_PACKS_INFIX = ".packs-"
_SHOWN = 10


@dataclass(frozen=True)
class Payload:
    """A file to pack.

    to: its path in the project on the far side. source: the file here, or its bytes. digest: as
    recorded by the stage that made the file, empty if unknown.
    """

    to: str
    source: Path | bytes
    bytes: int
    mode: int
    mtime_ns: int
    digest: str = ""


@dataclass(frozen=True)
class PackedDirectory:
    """A directory to pack.

    kind: the kind in its manifest, empty without a manifest. hidden: files and directories that
    stay behind because their names begin with a dot.
    """

    to: str
    source: Path
    payloads: list[Payload]
    fingerprint: str
    kind: str = ""
    hidden: tuple[str, ...] = ()


@dataclass(frozen=True)
class Commit:
    """A commit of the code. changed: files of the working tree that differ from it."""

    commit: str
    payloads: list[Payload] = field(repr=False)
    changed: list[str]

    def requirements(self, *kinds: str) -> dict[str, bytes]:
        """Return the contents of requirements.txt and of requirements-<kind>.txt, by file name."""
        names = ("requirements.txt", *(f"requirements-{kind}.txt" for kind in kinds))
        return {name: self.content(name) for name in names}

    def content(self, name: str) -> bytes:
        """Return the content of a file of the commit."""
        return next(
            file.source
            for file in self.payloads
            if file.to == name and isinstance(file.source, bytes)
        )


def read_commit(allow_dirty: bool) -> Commit:
    """Return the files of the last commit.

    Raises UsageError if git is missing, or if the code here differs from the commit and allow_dirty
    is not set. Untracked files count only in directories of code, so bundles, data and notes do not
    matter.
    """
    status = _run_git("status", "--porcelain", "-z", "--no-renames").decode(errors="replace")
    changed = [
        line[3:]
        for line in status.split("\0")
        if line and (not line.startswith("??") or _is_code(line[3:]))
    ]
    if changed and not allow_dirty:
        raise UsageError(
            "the code here differs from its last commit",
            expected="everything committed, or --allow-dirty to pack without the changes",
            found="\n".join(changed[:10]),
        )
    payloads = []
    with tarfile.open(fileobj=io.BytesIO(_run_git("archive", "HEAD"))) as archive:
        for member in archive:
            if not member.isfile() or (file := archive.extractfile(member)) is None:
                continue
            data = file.read()
            payloads.append(
                Payload(
                    member.name,
                    data,
                    len(data),
                    0o755 if member.mode & 0o100 else 0o644,
                    int(member.mtime) * 10**9,
                )
            )
    return Commit(_run_git("rev-parse", "HEAD").decode().strip(), payloads, changed)


def _is_code(path: str) -> bool:
    """Return whether an untracked file, or directory (with a trailing slash), is code."""
    directory, slash, _ = path.partition("/")
    return (
        directory in _CODE_DIRECTORIES
        if slash
        else path.endswith((".py", ".toml", ".txt", "Makefile"))
    )


def _run_git(*arguments: str) -> bytes:
    try:
        process = subprocess.run(["git", "-C", str(_ROOT), *arguments], capture_output=True)
    except FileNotFoundError:
        raise UsageError("git is not installed, but the code is packed from its commit") from None
    if process.returncode:
        raise UsageError(
            f"{_ROOT} is not a git checkout, but the code is packed from its commit",
            found=process.stderr.decode(errors="replace").strip(),
        )
    return process.stdout


def find_artifacts(opts: Options) -> list[PackedDirectory]:
    """Return what --model, --dataset, --eval-suite, --classifier and --tokens name.

    Raises an error with all problems at once.
    """
    problems = Problems()
    artifacts = [
        *(problems.collect(partial(_find_model, name, opts.cache_dir)) for name in opts.model),
        *(problems.collect(partial(_find_dataset, name)) for name in opts.dataset),
        *(problems.collect(partial(_find_suite, name, opts.cache_dir)) for name in opts.eval_suite),
        *(problems.collect(partial(_find_classifier, path)) for path in opts.classifier),
    ]
    for name in opts.tokens:
        artifacts += problems.collect(partial(_find_tokens, name, opts.cache_dir)) or []
    problems.raise_if_any()
    by_target: dict[str, PackedDirectory] = {}
    for artifact in filter(None, artifacts):
        earlier = by_target.setdefault(artifact.to, artifact)
        if earlier.source.resolve() != artifact.source.resolve():
            problems.add(
                f"{earlier.source} and {artifact.source} would both become {artifact.to}",
                expected="directories with different names",
            )
    problems.raise_if_any()
    return list(by_target.values())


def _find_model(name: str, cache_dir: Path) -> PackedDirectory:
    directory = lookup.find_model(name, cache_dir)
    is_path = (Path(name).expanduser() / "config.json").is_file()
    target_name = directory.resolve().name if is_path else paths.model_dir_name(name)
    return list_directory(directory, f".cache/models/{target_name}")


def _find_dataset(name: str) -> PackedDirectory:
    directory = mixture.open_corpora([name])[0].dataset.path
    return list_directory(directory, f"hf_datasets/{directory.resolve().name}")


def _find_suite(name: str, cache_dir: Path) -> PackedDirectory:
    directory = tasks.find_suite(name, cache_dir)
    tasks.read_suite(directory)  # bad tasks are found here, not on the far side
    return list_directory(directory, f".cache/eval/{directory.resolve().name}")


def _find_classifier(path: Path) -> PackedDirectory:
    model_file.read_labels(path, "--classifier")
    return list_directory(path, f".cache/classifiers/{path.name}")


def _find_tokens(name: str, cache_dir: Path) -> list[PackedDirectory]:
    """Return the named store with its packing indexes, or all stores of the named dataset."""
    root = paths.tokens_root(cache_dir)
    path = Path(name)
    if path.name in ("", ".."):  # `.` and `..` have no name at their end
        path = path.resolve()
    named = [
        directory
        for directory in (path, root / name)
        if manifest.read_kind(directory) in (store.KIND, packing.KIND)
    ]
    directories = (
        named[:1]
        or _find_dataset_stores(name, root)
        or _find_dataset_stores(mixture.split_weight(name)[0], root)
    )
    for named_directory in named[:1]:
        tokens = named_directory.with_name(named_directory.name.partition(_PACKS_INFIX)[0])
        directories = (
            [tokens, *sorted(tokens.parent.glob(f"{tokens.name}{_PACKS_INFIX}*"))]
            if manifest.read_kind(named_directory) == store.KIND
            else [tokens, named_directory]
        )
    directories = [directory for directory in directories if _UNFINISHED not in directory.name]
    if not directories:
        existing = ", ".join(sorted(path.name for path in root.glob("*"))) or "nothing"
        raise ArtifactError(
            f"no token store called {name}",
            found=f"under {root}: {existing}",
            hint="stage 04 builds it, with --prepare-only",
        )
    for directory in directories:
        kind = packing.KIND if _PACKS_INFIX in directory.name else store.KIND
        content = manifest.read_manifest(directory, kind, "token store")
        manifest.require_intact(directory, content, "token store")
    return [
        list_directory(directory, f".cache/tokens/{directory.resolve().name}")
        for directory in directories
    ]


def _find_dataset_stores(name: str, root: Path) -> list[Path]:
    """Return the token stores of a dataset, as `-d` names it, with their packing indexes.

    A store belongs to the dataset if it has the name of the dataset or was built from its content.
    """
    dataset = find_dataset(name)
    names = {Path(name).name, paths.model_dir_name(name), dataset.resolve().name}
    fingerprint = ""
    with suppress(StageError):  # even if the dataset is gone, stores of its name can be packed
        fingerprint = open_dataset(dataset).fingerprint
    stores = set()
    for tokens in root.glob("*"):
        content = manifest.read_if_any(tokens) or {}
        is_named = tokens.name.rpartition("-")[0] in names
        if is_named or (
            content.get("kind") == store.KIND
            and _read_inputs(content).get("dataset") == fingerprint
        ):
            stores.add(tokens.name)
    return [
        tokens
        for tokens in sorted(root.glob("*"))
        if (tokens / MANIFEST).is_file() and tokens.name.partition(_PACKS_INFIX)[0] in stores
    ]


def list_directory(directory: Path, to: str) -> PackedDirectory:
    """Return the files below a directory; for a file, return this file.

    Hidden files stay behind unless the manifest lists them, since they may be secrets. Raises
    UsageError for links that a bundle must not follow. Raises ArtifactError if the directory
    contains no file, or entries that are not regular files.
    """
    content = manifest.read_if_any(directory)
    root = directory.resolve()
    digests = {entry["path"]: entry["digest"] for entry in content["files"]} if content else {}
    payloads = []
    links = []
    hidden: dict[str, None] = {}
    for path in [root] if root.is_file() else sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path != root and (hidden_part := _find_hidden(name)) and name not in digests:
            hidden[hidden_part] = None
            continue
        if path.is_symlink() and not _is_in_hub_cache(root, path):
            links.append(f"{path} → {path.readlink()}")
            continue
        if path.is_dir():
            continue
        if not path.is_file():
            raise ArtifactError(f"{path} is not a plain file and cannot be packed")
        status = path.stat()
        payloads.append(
            Payload(
                to if path == root else f"{to}/{name}",
                path,
                status.st_size,
                0o755 if status.st_mode & 0o100 else 0o644,
                status.st_mtime_ns,
                digests.get(name, ""),
            )
        )
    if links:
        raise UsageError(
            f"{directory} contains {units.counted(len(links), 'link')}, and a bundle does not "
            "follow links",
            expected="files, or links into the blobs of a Hugging Face cache",
            found=units.join_lines(links, _SHOWN),
            hint="delete the links, or replace them by copies of the files",
        )
    if not payloads:
        raise ArtifactError(f"{directory} contains no file to pack")
    fingerprint = (
        hashing.file_digest(directory / MANIFEST, "sha256")
        if content
        else hashing.fingerprint(
            [[payload.to, payload.bytes, payload.mtime_ns] for payload in payloads]
        )
    )
    kind = content["kind"] if content else ""
    return PackedDirectory(to, directory, payloads, fingerprint, kind, tuple(hidden))


def _find_hidden(name: str) -> str:
    """Return the part of a relative path up to the first name that begins with a dot, or ""."""
    parts = name.split("/")
    first = next((i for i, part in enumerate(parts) if part.startswith(".")), None)
    return "" if first is None else "/".join(parts[: first + 1])


def _is_in_hub_cache(root: Path, link: Path) -> bool:
    """Return whether a link leads from a snapshot of the Hub's cache to a blob beside it.

    root: the snapshot, `models--org--name/snapshots/<commit>`. The blob must be a file itself.
    """
    repository = root.parent.parent
    target = Path(os.path.realpath(link))
    return root.parent.name == "snapshots" and target.parent == repository / "blobs"


def describe_missing(opts: Options, artifacts: list[PackedDirectory]) -> list[str]:
    """Return warnings about hidden files, and about artifacts that stage 04 needs on the far side.

    They are not packed.
    """
    by_target = {artifact.to: artifact for artifact in artifacts}
    data = [artifact for artifact in artifacts if artifact.to.startswith("hf_datasets/")]
    fingerprints = [open_dataset(artifact.source).fingerprint for artifact in data]
    lines = [
        f"hidden in {artifact.source} and not packed: {units.join_names(artifact.hidden, _SHOWN)}"
        for artifact in artifacts
        if artifact.hidden
    ]
    for artifact in artifacts:
        if artifact.kind == store.KIND:
            content = manifest.read_manifest(artifact.source, store.KIND, "token store")
            if _read_inputs(content).get("dataset") not in fingerprints:
                lines.append(
                    f"{artifact.to} belongs to a dataset that is not packed; stage 04 needs "
                    "both (--dataset)"
                )
    for model in (a for a in artifacts if a.to.startswith(".cache/models/")):
        for dataset in data:
            for token_store in _find_stores(opts.cache_dir, dataset.source, model.source):
                if f".cache/tokens/{token_store.name}" not in by_target:
                    lines.append(
                        f"the tokens of {dataset.to} for {model.to} exist and are not "
                        f"packed (--tokens {token_store.name}), so stage 04 builds them again on "
                        "the far side"
                    )
    return lines


def _find_stores(cache_dir: Path, dataset: Path, model: Path) -> list[Path]:
    """Return the finished token stores of a dataset and a model.

    A chat dataset has a store per sequence length and chat template that it was prepared with.
    """
    try:
        inputs = {
            "dataset": open_dataset(dataset).fingerprint,
            "tokenizer": tokenizer_fingerprint(model),
        }
    except ArtifactError:  # a model without a tokenizer
        return []
    stores = []
    for directory in sorted(paths.tokens_root(cache_dir).glob("*")):
        content = manifest.read_if_any(directory) or {}
        if content.get("kind") == store.KIND and inputs.items() <= _read_inputs(content).items():
            stores.append(directory)
    return stores


def _read_inputs(content: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprints of an artifact's inputs, {} if its manifest has none."""
    inputs = content.get("identity", {}).get("inputs")
    return inputs if isinstance(inputs, dict) else {}


def list_next_commands(artifacts: list[PackedDirectory]) -> list[str]:
    """Return the commands to type on the far side."""
    data = [artifact.to for artifact in artifacts if artifact.to.startswith("hf_datasets/")]
    models = [artifact for artifact in artifacts if artifact.to.startswith(".cache/models/")]
    lines = ["make validate-framework"]
    if data and models:
        model: Any = models[0].to if not models[0].kind else Path(models[0].to).name
        words = ["torchrun", "04_train_fsdp.py", "-e", "exp", "-d", data[0], "-m", model]
        lines.append(shlex.join(words))
    return lines
