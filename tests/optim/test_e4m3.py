"""Integer arithmetic gives the bits of torch's casts to and from e4m3, for every code and value."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from lib.optim import adamw8bit, e4m3

EVERY = torch.arange(256, dtype=torch.int32).to(torch.uint8)
# All float32 values whose last 20 bits are zero.
CUT = (torch.arange(-2048, 2048, dtype=torch.int32) << 20).view(torch.float32)


@pytest.fixture(params=["eager", "aot_eager"])
def through(request: pytest.FixtureRequest):
    """Return what runs a function as it is, or traced by the compiler."""
    torch._dynamo.reset()
    return partial(torch.compile, backend=request.param)


def test_every_code_is_decoded_as_by_torch(through) -> None:
    expected = EVERY.view(torch.float8_e4m3fn).float()
    found = through(e4m3.decode)(EVERY)
    is_number = expected.isfinite()
    assert is_number.sum() == 254 and found[~is_number].isnan().all()
    assert torch.equal(found[is_number].view(torch.int32), expected[is_number].view(torch.int32))


def test_every_truncated_value_is_encoded_as_by_torch(through) -> None:
    """Subnormals are among them: e4m3 rounds them once more. Those above 448 never come about."""
    small = CUT[CUT.abs() <= 448]
    assert ((small.abs() < 2**-6) & (small != 0)).sum() > 1900
    expected = small.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(through(e4m3.encode)(small), expected)
    assert set(expected.tolist()) == set(range(256)) - {0x7F, 0xFF}
    odd = e4m3.encode(torch.tensor([torch.nan, torch.inf, -torch.inf, 512.0]))
    assert odd.tolist() == [0x7F, 0x7E, 0xFE, 0x7E]


def test_every_code_is_decoded_and_encoded_unchanged() -> None:
    assert torch.equal(e4m3.encode(e4m3.decode(EVERY))[:127], EVERY[:127])


@pytest.mark.parametrize("raised", [0, 1, 1 << 19, (1 << 20) - 1])
def test_a_moment_is_the_same_with_and_without_integer_arithmetic(raised: int) -> None:
    """Numbers from subnormal to the largest of a block, at both ends of the rounding."""
    torch.manual_seed(0)
    values = torch.randn(200, 1024) * 10 ** torch.linspace(-6, 3, 1024)
    kept = [torch.zeros(200, 1024, dtype=torch.uint8), torch.zeros(200, 4)]
    added = torch.tensor(raised, dtype=torch.int32)
    by_cast, by_bits = (adamw8bit._encode_moment(values, added, kept, way) for way in (False, True))
    assert all(map(torch.equal, by_cast, by_bits))
    assert torch.equal(
        adamw8bit._decode_moment(by_cast), adamw8bit._decode_moment(by_cast, by_bits=True)
    )
