"""Writes a safetensors file tensor by tensor, so that memory holds one of them at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lib.core import hashing

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16",
          torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16",
          torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}


def write(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write tensors on the CPU in their order; return the manifest entry (SHA-256).

    The format: 8 bytes little-endian length, that much JSON, data
    (https://huggingface.co/docs/safetensors, "Format").
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, tensor in tensors.items():
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape),
                       "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begins at a multiple of 8
    hasher = hashing.new("sha256")
    with path.open("wb") as file:
        for data in (len(text).to_bytes(8, "little"), text):
            hasher.update(data)
            file.write(data)
        for tensor in tensors.values():
            content: Any = tensor.detach().contiguous().flatten().view(torch.uint8).numpy()
            hasher.update(content)
            file.write(content)
    return {"path": path.name, "bytes": path.stat().st_size,
            "digest": hashing.digest(hasher, "sha256")}
