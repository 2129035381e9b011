"""Read the files of a model directory: list and count its weights, and fingerprint them.

Works offline and imports neither torch nor transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from lib.core import artifacts, hashing, manifest, placeholders, records
from lib.core.errors import ArtifactError, StageError
from lib.core.paths import MANIFEST
from lib.models import dialects

KIND = "model/1"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
EARLIER_KEYS = "earlier_keys"  # in a manifest's summary: the keys `dialects` added to config.json
GENERATION_CONFIG = "generation_config.json"
CODE_DIGESTS = "trusted_code.json"  # SHA-256 of each code file; not a permission to run them
LARGEST_HEADER = 100_000_000  # bytes of a safetensors header; the limit of the format
_MODEL_SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".py")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "consolidated*.pth")
_READ_SUFFIXES = (".safetensors", INDEX, ".py", CODE_DIGESTS)


@contextmanager
def rename_in_errors(name: str, *paths: Path) -> Iterator[None]:
    """Replace paths of temporary directories in errors by a name that the user knows.

    paths: replaced in this order, so the longest must come first.
    """
    try:
        yield
    except StageError as error:
        for part in ("problem", "expected", "found", "run"):
            for path in paths:
                setattr(error, part, getattr(error, part).replace(str(path), name))
        raise


def list_model_files(model_dir: Path) -> list[Path]:
    """Return the files that belong to a model: config, weights, tokenizer and code."""
    return [
        path
        for path in sorted(model_dir.iterdir())
        if path.name.endswith(_MODEL_SUFFIXES) and path.is_file()
    ]


def list_strays(model_dir: Path, content: dict[str, Any]) -> list[str]:
    """Return a message for each file of weights or code that is not in the directory's manifest.

    Such a file could be read instead of a verified one: `model.safetensors` takes precedence over
    shards.
    """
    known = {entry["path"] for entry in content["files"]}
    return [
        f"{path} does not belong to this model: its {MANIFEST} does not list it"
        for path in sorted(model_dir.iterdir())
        if path.name not in known
        and path.name.endswith(_READ_SUFFIXES)
        and not path.name.startswith(".")
    ]


def require_data(model_dir: Path) -> None:
    """Raise ArtifactError if a pointer or an error page stands in place of a file that is read."""
    names = {CONFIG, GENERATION_CONFIG, INDEX, CODE_DIGESTS, *artifacts.TOKENIZER_FILES}
    names |= {path.name for path in model_dir.glob("*.py")}
    with suppress(ValueError):  # the index is a pointer, or is reported as damaged
        names.update(list_weight_files(model_dir))
    if not has_weights(model_dir):
        names |= {path.name for glob in _WEIGHTS for path in model_dir.glob(glob)}
    placeholders.require_data((model_dir / name for name in sorted(names)), str(model_dir))


def has_weights(model_dir: Path) -> bool:
    """Return whether a model directory contains safetensors weights, in one file or in shards."""
    return (model_dir / WEIGHTS).is_file() or (model_dir / INDEX).is_file()


def is_made_from_scratch(model_dir: Path) -> bool:
    """Return whether stage 03 or 04 created this model from scratch, without weights."""
    content = manifest.read_if_any(model_dir)
    return content is not None and content["summary"].get("source") == "scratch"


def list_missing_weights(model_dir: Path) -> list[str]:
    """Return a message for each missing file of weights, or [] if all are present.

    Only file names are checked, because a copy of a directory may lack some files.
    """
    if not has_weights(model_dir):
        others = sorted(path.name for path in model_dir.glob("*.safetensors"))
        return [
            f"{name} cannot be used: it has another layout, or {INDEX} is missing"
            for name in others[:5]
        ] or ["config.json without any .safetensors file"]
    try:
        return [
            f"{name} is missing, but {INDEX} lists it"
            for name in list_weight_files(model_dir)
            if not (model_dir / name).is_file()
        ]
    except ValueError:
        return [f"{INDEX} is damaged"]


def list_weight_files(model_dir: Path) -> list[str]:
    """Return the names of the files that contain a model's weights.

    Raises ValueError if the index is damaged or names files outside of the directory.
    """
    if (model_dir / WEIGHTS).is_file() or not (model_dir / INDEX).is_file():
        return [WEIGHTS]
    names = sorted(set(read_index(model_dir / INDEX).values()))
    if any(map(records.leads_out, names)):
        raise ValueError(f"{INDEX} names files outside of the directory")
    return names


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor in an index. Raises ValueError if it is damaged."""
    try:
        weight_map = records.read_json(path)["weight_map"]
        return {str(key): str(file) for key, file in weight_map.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} has no weight_map") from error


def read_header(path: Path, size: int) -> tuple[dict[str, Any], int]:
    """Return the header of a safetensors file, and the offset in bytes at which its data begins.

    size: bytes of the complete file; only its beginning must exist. The format is a length (8
    bytes, little-endian), a JSON header of that length, and data
    (https://huggingface.co/docs/safetensors, "Format"). Raises ValueError if the header is missing
    or an entry lacks dtype, shape or offsets.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST_HEADER, size - 8):
            if placeholder := placeholders.find_in_file(path):
                raise ValueError(f"it is {placeholder}")
            raise ValueError(f"its header would have {length} of {size} bytes")
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
    """Return whether a value is a list of integers that are 0 or more."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def find_misplaced(header: dict[str, Any], sizes: Mapping[str, int], where: str) -> Iterator[str]:
    """Yield a message for each tensor in a header that does not begin where the previous one ends.

    sizes: bytes per element for each dtype; tensors of other dtypes may have any size. where: text
    after the name of the tensor, such as " in FILE".
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


def read_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Return the shape of each tensor in the weights of a directory, {} if they cannot be read."""
    shapes: dict[str, list[int]] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):  # reported when weights are read
        for path in (model_dir / name for name in list_weight_files(model_dir)):
            header, _ = read_header(path, path.stat().st_size)
            shapes |= {name: tensor["shape"] for name, tensor in header.items()}
        return shapes
    return {}


def count_parameters(model_dir: Path) -> int:
    """Return the number of parameters of a model, or 0 if it is unknown.

    The number comes from the manifest or from the headers of the weights.
    """
    content = manifest.read_if_any(model_dir) or {}
    if recorded := content.get("summary", {}).get("parameters"):
        return int(recorded)
    return sum(map(math.prod, read_shapes(model_dir).values()))


def fingerprint_model(model_dir: Path) -> str:
    """Return a fingerprint of config, weights and code that does not depend on the path.

    With a manifest, the fingerprint covers config.json and the digests of the weights. Keys that
    `dialects` added to config.json are left out unless the file was edited since. Without a
    manifest, the fingerprint covers config.json, and the size and header of each safetensors file.
    Raises ArtifactError if config.json is damaged.
    """
    try:
        config = records.read_json(model_dir / CONFIG)
    except ValueError as error:
        raise ArtifactError(f"{model_dir / CONFIG} is damaged", found=str(error)) from None
    content = manifest.read_if_any(model_dir)
    if content is not None:
        added = content["summary"].get(EARLIER_KEYS)
        if added and isinstance(config, dict) and _is_as_published(model_dir, content["files"]):
            # Models of earlier versions, which lack these keys, keep their fingerprint.
            config = dialects.remove_keys(config, added)
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
    """Return whether config.json still has the digest in the manifest."""
    recorded = [entry["digest"] for entry in files if entry["path"] == CONFIG]
    return recorded == [hashing.file_digest(model_dir / CONFIG, "sha256")]


def _digest_header(path: Path) -> str:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashing.bytes_digest(file.read(min(length, 1 << 26)), "sha256")
