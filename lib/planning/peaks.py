"""List the peak FLOP/s of GPUs by name, without importing torch."""

from __future__ import annotations

import re

# Dense bf16/fp16 tensor-core peaks without sparsity, summed in float32, in FLOP/s, from the
# vendors' data sheets. The keys are words in the names that the driver reports.
_PEAKS = {
    "GB300": 2500e12,
    "B300": 2250e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10G": 70e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "V100": 125e12,
    "RTX PRO 6000": 503.8e12,
    "RTX 6000 Ada": 364e12,
    "RTX A6000": 155e12,
    "RTX 5090": 209.5e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
_MIG = re.compile(r"\bMIG (\d)g\b")  # the number of sevenths of a GPU
_PLANNED_FOR = "H100"
_PLANNED_FP32_PEAK = 67e12  # without tensor cores


def find_planned_gpu(precision: str) -> tuple[float, str]:
    """Return the peak in FLOP/s of the GPU that --plan-gpus assumes, and its name."""
    return _PLANNED_FP32_PEAK if precision == "fp32" else _PEAKS[_PLANNED_FOR], _PLANNED_FOR


def find_listed_peak(name: str) -> float | None:
    """Return the peak in FLOP/s of a GPU, or of a part of one (MIG); None if it is not listed."""
    known = [listed for listed in _PEAKS if re.search(rf"\b{listed}\b", name)]
    if not known:
        return None
    part = _MIG.search(name)
    return _PEAKS[max(known, key=len)] * (int(part[1]) / 7 if part else 1.0)
