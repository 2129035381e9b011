"""Writes safetensors files: what they begin with, and whole ones tensor by tensor.

The format: 8 bytes little-endian length, that much JSON, data
(https://huggingface.co/docs/safetensors, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.core import hashing

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
          torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
          torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def header(tensors: Iterable[tuple[str, Sequence[int], torch.dtype]]) -> bytes:
    """Return what a file begins with for tensors (name, shape, dtype) in this order.

    `format: pt` is what transformers looks for.
    """
    content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, shape, dtype in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        content[key] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors on the CPU in their order; return the manifest entry (SHA-256)."""
    begin = header((key, tensor.shape, tensor.dtype) for key, tensor in tensors.items())
    hasher = hashing.new("sha256")
    with path.open("wb") as file:
        hasher.update(begin)
        file.write(begin)
        for tensor in tensors.values():
            content: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            hasher.update(content)
            file.write(content)
    return {"path": path.name, "bytes": path.stat().st_size,
            "digest": hashing.digest(hasher, "sha256")}
