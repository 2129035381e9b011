"""What a model directory holds, told from its files alone: no torch, no transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lib.core import hashing, manifest, records
from lib.core.errors import ArtifactError
from lib.core.paths import MANIFEST

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CODE_DIGESTS = "trusted_code.json"  # SHA-256 of each code file by its name; no leave to run it
LARGEST_HEADER = 100_000_000  # bytes of a safetensors file; the format's own limit
_TOGETHER = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
_READ = (".safetensors", INDEX, ".py", CODE_DIGESTS)


def files(model_dir: Path) -> list[Path]:
    """Return the files that make a model: config, weights, tokenizer and code."""
    return [path for path in sorted(model_dir.iterdir())
            if path.name.endswith(_TOGETHER) and path.is_file()]


def has_weights(model_dir: Path) -> bool:
    """Tell whether a model directory holds safetensors weights, whole or in shards."""
    return (model_dir / WEIGHTS).is_file() or (model_dir / INDEX).is_file()


def missing_weights(model_dir: Path) -> list[str]:
    """Return a sentence for each thing that a directory's weights lack; empty when they are there.

    Only names are looked at, as whoever copied the directory may have left some behind.
    """
    if (model_dir / WEIGHTS).is_file():
        return []
    if (model_dir / INDEX).is_file():
        try:
            index = records.read_json(model_dir / INDEX)
            shards = sorted(set(map(str, index["weight_map"].values())))
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{INDEX} is damaged"]
        return [f"{name} is missing, {INDEX} names it" for name in shards
                if not (model_dir / name).is_file()]
    others = sorted(path.name for path in model_dir.glob("*.safetensors"))
    return [f"{name}, which is not read: it has another layout, or {INDEX} is missing"
            for name in others[:5]] or ["config.json without any .safetensors file"]


def is_made_from_scratch(model_dir: Path) -> bool:
    """Tell whether stage 03 or 04 made a directory that is meant to have no weights."""
    content = manifest.read_if_any(model_dir)
    return content is not None and content["summary"].get("source") == "scratch"


def fingerprint(model_dir: Path) -> str:
    """Identify config and weights wherever the directory lies, without reading all weights.

    A directory of stage 03: the digests of its manifest. One made elsewhere: config.json, and
    size and header of each safetensors file. Code that comes with a model counts too.
    Raises ArtifactError when config.json is damaged.
    """
    try:
        config = records.read_json(model_dir / "config.json")
    except ValueError as error:
        raise ArtifactError(f"{model_dir / 'config.json'} is damaged", found=str(error)) from None
    content = manifest.read_if_any(model_dir)
    if content is not None:
        weights = [[e["path"], e["digest"]] for e in content["files"]
                   if e["path"].endswith(".safetensors")]
    else:
        weights = [[path.name, path.stat().st_size, _header_digest(path)]
                   for path in sorted(model_dir.glob("model*.safetensors"))]
    code = model_dir / CODE_DIGESTS
    return hashing.fingerprint([config, weights] + ([code.read_text(encoding="utf-8")]
                                                    if code.is_file() else []))


def strays(model_dir: Path, content: dict[str, Any]) -> list[str]:
    """Return a sentence for each file of weights or code that the directory's manifest lacks.

    It would be read in the place of what was verified: `model.safetensors` goes before shards.
    """
    known = {entry["path"] for entry in content["files"]}
    return [f"{path} is not of this model: its {MANIFEST} does not name it"
            for path in sorted(model_dir.iterdir()) if path.name not in known
            and path.name.endswith(_READ) and not path.name.startswith(".")]


def _header_digest(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashing.bytes_digest(file.read(min(length, 1 << 26)), "sha256")
