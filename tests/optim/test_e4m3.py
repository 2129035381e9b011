# covers: lib/optim/e4m3.py, lib/optim/adamw8bit.py
"""Integer arithmetic gives the same bits as torch's casts to and from e4m3."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lib.optim import adamw8bit, e4m3

ALL_CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# All float32 values whose last 20 bits are zero.
TRUNCATED = (torch.arange(-2048, 2048, dtype=torch.int32) << 20).view(torch.float32)


@pytest.fixture(params=["eager", "aot_eager"])
def compile_function(request: pytest.FixtureRequest):
    """Return a function that compiles a function, with a backend that generates no code."""
    torch._dynamo.reset()
    return partial(torch.compile, backend=request.param)


def test_every_code_is_decoded_as_by_torch(compile_function) -> None:
    expected = ALL_CODES.view(torch.float8_e4m3fn).float()
    values = compile_function(e4m3.decode)(ALL_CODES)
    is_number = expected.isfinite()
    assert is_number.sum() == 254 and values[~is_number].isnan().all()
    assert torch.equal(values[is_number].view(torch.int32), expected[is_number].view(torch.int32))


def test_every_truncated_value_is_encoded_as_by_torch(compile_function) -> None:
    """e4m3 rounds subnormals once more. The optimizer produces no values above 448."""
    small = TRUNCATED[TRUNCATED.abs() <= 448]
    assert ((small.abs() < 2**-6) & (small != 0)).sum() > 1900
    expected = small.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(compile_function(e4m3.encode)(small), expected)
    assert set(expected.tolist()) == set(range(256)) - {0x7F, 0xFF}
    extremes = e4m3.encode(torch.tensor([torch.nan, torch.inf, -torch.inf, 512.0]))
    assert extremes.tolist() == [0x7F, 0x7E, 0xFE, 0x7E]


def test_every_code_is_decoded_and_encoded_unchanged() -> None:
    assert torch.equal(e4m3.encode(e4m3.decode(ALL_CODES))[:127], ALL_CODES[:127])


@pytest.mark.parametrize("offset", [0, 1, 1 << 19, (1 << 20) - 1])
def test_a_moment_is_the_same_with_and_without_integer_arithmetic(offset: int) -> None:
    """Test all magnitudes of numbers in a block, and the smallest and largest rounding offsets."""
    torch.manual_seed(0)
    values = torch.randn(200, 1024) * 10 ** torch.linspace(-6, 3, 1024)
    stored = [torch.zeros(200, 1024, dtype=torch.uint8), torch.zeros(200, 4)]
    round_offset = torch.tensor(offset, dtype=torch.int32)
    by_cast, by_integers = (
        adamw8bit._encode_moment(values, round_offset, stored, use_integers)
        for use_integers in (False, True)
    )
    assert all(map(torch.equal, by_cast, by_integers))
    assert torch.equal(
        adamw8bit._decode_moment(by_cast), adamw8bit._decode_moment(by_cast, use_integers=True)
    )
