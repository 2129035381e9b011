"""Convert to and from 8-bit floats (e4m3) with integer arithmetic, for GPUs that cannot cast them.

Triton compiles casts to e4m3 only from compute capability 8.9 on. On older GPUs it compiles these
functions instead. They return the same bits as torch's casts.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SIGN = 0x80
_MAGNITUDE = 0x7F
_NAN = 0x7F  # its code, without the sign
_LARGEST = 0x7E  # code of 448
_INFINITY = 0x7F800000  # bits of a float32
_LOST_BITS = 20  # mantissa bits of a float32 that e4m3 lacks
_REBIAS = 127 - 7  # difference between the exponent biases of float32 and e4m3
_FIRST_NORMAL = 1 << 3  # code of the smallest normal number
_SUBNORMAL_STEP = 2.0**-9  # distance between subnormal numbers
_ALIGN = 2.0**14  # the last mantissa bit of this float32 is worth _SUBNORMAL_STEP


def decode(codes: Tensor) -> Tensor:
    """Return the float32 values of e4m3 codes. codes: uint8, of any shape."""
    bits = codes.to(torch.int32)
    magnitude = bits & _MAGNITUDE
    normal = ((magnitude << _LOST_BITS) + (_REBIAS << 23)).view(torch.float32)
    values = torch.where(magnitude < _FIRST_NORMAL, magnitude.float() * _SUBNORMAL_STEP, normal)
    values = torch.where(magnitude == _NAN, torch.nan, values)
    return torch.where(bits >= _SIGN, -values, values)


def encode(values: Tensor) -> Tensor:
    """Return the e4m3 codes (uint8) of float32 values whose last 20 bits are zero.

    Subnormal results are rounded to the nearest code, ties to even. Values above 448 become 448.
    """
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # The addition shifts a small value to the end of the mantissa and rounds it there.
    aligned = (magnitude.view(torch.float32) + _ALIGN).view(torch.int32)
    subnormal = aligned & (_FIRST_NORMAL | (_FIRST_NORMAL - 1))
    rebiased = (magnitude >> _LOST_BITS) - (_REBIAS << 3)
    codes = torch.where(rebiased < _FIRST_NORMAL, subnormal, rebiased.clamp(max=_LARGEST))
    codes = torch.where(magnitude > _INFINITY, _NAN, codes)
    return (codes | (bits >> 24 & _SIGN)).to(torch.uint8)
