"""Knows model directories from their files alone: what is in one, whether it is whole.

Offline, and without importing any library of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import hashing, manifest, records
from lib.core.errors import ArtifactError, StageError
from lib.core.paths import MANIFEST
from lib.models import dialects

KIND = "model/1"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EARLIER_KEYS = "earlier_keys"  # in the summary of a manifest: what `dialects` added to config.json
CODE_DIGESTS = "trusted_code.json"  # SHA-256 of each code file by its name; no leave to run it
LARGEST_HEADER = 100_000_000  # bytes of a safetensors file; the format's own limit
_TOGETHER = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
_READ = (".safetensors", INDEX, ".py", CODE_DIGESTS)


@contextmanager
def rename_in_errors(name: str, *paths: Path) -> Iterator[None]:
    """Let errors about a path of ours, maybe soon gone, speak of something known instead.

    paths: the longest first.
    """
    try:
        yield
    except StageError as error:
        for part in ("problem", "expected", "found", "run"):
            for path in paths:
                setattr(error, part, getattr(error, part).replace(str(path), name))
        raise


def list_files(model_dir: Path) -> list[Path]:
    """Return the files that make a model: config, weights, tokenizer and code."""
    return [
        path
        for path in sorted(model_dir.iterdir())
        if path.name.endswith(_TOGETHER) and path.is_file()
    ]


def list_strays(model_dir: Path, content: dict[str, Any]) -> list[str]:
    """Return a sentence for each file of weights or code that the directory's manifest lacks.

    It would be read in the place of what was verified: `model.safetensors` goes before shards.
    """
    known = {entry["path"] for entry in content["files"]}
    return [
        f"{path} is not of this model: its {MANIFEST} does not name it"
        for path in sorted(model_dir.iterdir())
        if path.name not in known and path.name.endswith(_READ) and not path.name.startswith(".")
    ]


def has_weights(model_dir: Path) -> bool:
    """Tell whether a model directory holds safetensors weights, whole or in shards."""
    return (model_dir / WEIGHTS).is_file() or (model_dir / INDEX).is_file()


def is_made_from_scratch(model_dir: Path) -> bool:
    """Tell whether stage 03 or 04 made a directory that is meant to have no weights."""
    content = manifest.read_if_any(model_dir)
    return content is not None and content["summary"].get("source") == "scratch"


def list_missing_weights(model_dir: Path) -> list[str]:
    """Return a sentence for each thing that a directory's weights lack; empty when they are there.

    Only names are looked at, as whoever copied the directory may have left some behind.
    """
    if not has_weights(model_dir):
        others = sorted(path.name for path in model_dir.glob("*.safetensors"))
        return [
            f"{name}, which is not read: it has another layout, or {INDEX} is missing"
            for name in others[:5]
        ] or ["config.json without any .safetensors file"]
    try:
        return [
            f"{name} is missing, {INDEX} names it"
            for name in weight_files(model_dir)
            if not (model_dir / name).is_file()
        ]
    except ValueError:
        return [f"{INDEX} is damaged"]


def weight_files(model_dir: Path) -> list[str]:
    """Return the names of the files that hold a model's weights.

    Raises ValueError for an index that is damaged or names files elsewhere.
    """
    if (model_dir / WEIGHTS).is_file() or not (model_dir / INDEX).is_file():
        return [WEIGHTS]
    names = sorted(set(read_index(model_dir / INDEX).values()))
    if any(map(records.leads_out, names)):
        raise ValueError(f"{INDEX} names files elsewhere")
    return names


def read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor, as an index says; ValueError when it is damaged."""
    try:
        weight_map = records.read_json(path)["weight_map"]
        return {str(key): str(file) for key, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} has no weight_map") from error


def read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the byte at which its data begins.

    size: of the whole file, of which only the beginning need be there. The format: 8 bytes
    little-endian length, that much JSON, data (https://huggingface.co/docs/safetensors, "Format").
    Raises ValueError when there is no header, or a tensor in it has no dtype, shape and offsets.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            raise ValueError(f"its header would take {length} of {size} bytes")
        header = records.parse_json(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    header.pop("__metadata__", None)
    for key, entry in header.items():
        if (
            not isinstance(entry, dict)
            or not isinstance(entry.get("dtype"), str)
            or not _are_counts(entry.get("shape"))
            or not _are_counts(entry.get("data_offsets"))
            or len(entry["data_offsets"]) != 2
        ):
            raise ValueError(f"its header has no dtype, shape and offsets for {key!r:.80}")
    return header, 8 + length


def _are_counts(values: Any) -> bool:
    """Return whether a value is a list of whole numbers, 0 or more."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def find_misplaced(header: dict[str, Any], sizes: Mapping[str, int], where: str) -> Iterator[str]:
    """Yield a sentence for each tensor of a header that does not begin where the one before ends.

    sizes: bytes of a number of each dtype; that of tensors of other dtypes is not checked.
    where: put behind the name of the tensor.
    """
    end = 0
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = entry["data_offsets"]
        size = (
            math.prod(entry["shape"]) * sizes[entry["dtype"]]
            if entry["dtype"] in sizes
            else max(0, last - first)
        )
        if (first, last) != (end, end + size):
            yield f"{key}{where} lies at bytes {first} to {last}, expected {end} to {end + size}"
        end = max(end, last)


def count_parameters(model_dir: Path) -> int:
    """Return how many parameters a model has: as stage 03 noted, or by the headers of its weights;
    0 where neither is there.
    """
    content = manifest.read_if_any(model_dir) or {}
    if noted := content.get("summary", {}).get("parameters"):
        return int(noted)
    total = 0
    with suppress(OSError, ValueError, KeyError, TypeError):  # whoever reads the weights says more
        for path in (model_dir / name for name in weight_files(model_dir)):
            header, _ = read_header(path, path.stat().st_size)
            total += sum(math.prod(tensor["shape"]) for tensor in header.values())
        return total
    return 0


def fingerprint(model_dir: Path) -> str:
    """Identify config and weights wherever the directory lies, without reading all weights.

    A directory of ours: the digests of its manifest, and config.json, without what `dialects`
    added unless somebody has edited the file since. One made elsewhere: config.json, and size and
    header of each safetensors file.
    Code that comes with a model counts too.
    Raises ArtifactError when config.json is damaged.
    """
    try:
        config = records.read_json(model_dir / CONFIG)
    except ValueError as error:
        raise ArtifactError(f"{model_dir / CONFIG} is damaged", found=str(error)) from None
    content = manifest.read_if_any(model_dir)
    if content is not None:
        added = content["summary"].get(EARLIER_KEYS)
        if added and isinstance(config, dict) and _is_as_published(model_dir, content["files"]):
            # A model made before these keys were written is the same one.
            config = dialects.remove(config, added)
        weights = [
            [e["path"], e["digest"]] for e in content["files"] if e["path"].endswith(".safetensors")
        ]
    else:
        weights = [
            [path.name, path.stat().st_size, _digest_header(path)]
            for path in sorted(model_dir.glob("model*.safetensors"))
        ]
    code = model_dir / CODE_DIGESTS
    return hashing.fingerprint(
        [config, weights] + ([code.read_text(encoding="utf-8")] if code.is_file() else [])
    )


def _is_as_published(model_dir: Path, files: list[dict[str, Any]]) -> bool:
    """Return whether config.json has the digest that the manifest names."""
    known = [entry["digest"] for entry in files if entry["path"] == CONFIG]
    return known == [hashing.file_digest(model_dir / CONFIG, "sha256")]


def _digest_header(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashing.bytes_digest(file.read(min(length, 1 << 26)), "sha256")
