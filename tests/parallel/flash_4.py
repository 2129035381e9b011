"""A package with the name and the functions of flash-attn-4, which computes on a CPU."""

from __future__ import annotations

from pathlib import Path

VERSION = "4.0.0b36"
_INTERFACE = """
import torch

calls = []

def _attend(query, key, value, ends, scale, window):
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    at = torch.arange(len(query))
    of = torch.bucketize(at, ends[1:], right=True)
    sees = (of[:, None] == of) & (at[:, None] >= at)
    if window is not None:
        sees &= at[:, None] - at <= window
    scores = torch.einsum("ihd,jhd->hij", query, key) * scale
    scores = scores.masked_fill(~sees, -torch.inf)
    return key, value, scores.softmax(-1), scores.logsumexp(-1)

def _flash_attn_fwd(
    q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal,
    window_size_left, window_size_right, return_lse,
):
    calls.append(window_size_left)
    assert causal == (window_size_left is None) and return_lse
    assert all(part.shape[2] % 8 == 0 and part.stride(-1) == 1 for part in (q, k, v))
    _, values, weights, sums = _attend(q, k, v, cu_seqlens_q, softmax_scale, window_size_left)
    out = torch.einsum("hij,jhd->ihd", weights, values)
    return out.contiguous(), sums, None, None, None

def _flash_attn_bwd(
    q, k, v, out, dout, lse, *, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal,
    window_size_left, window_size_right,
):
    assert causal == (window_size_left is None)
    assert lse.shape == (q.shape[1], len(q)) and out.shape == dout.shape
    keys, values, weights, _ = _attend(q, k, v, cu_seqlens_q, softmax_scale, window_size_left)
    of_weights = torch.einsum("ihd,jhd->hij", dout, values)
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, True)) * softmax_scale
    of_query = torch.einsum("hij,jhd->ihd", of_scores, keys)
    of_key = torch.einsum("hij,ihd->jhd", of_scores, q)
    of_value = torch.einsum("hij,ihd->jhd", weights, dout)
    groups = (k.shape[1], -1)
    return (
        of_query.contiguous(),
        of_key.unflatten(1, groups).sum(2),
        of_value.unflatten(1, groups).sum(2),
    )
"""


def write_package(directory: Path, change: tuple[str, str] = ("", "")) -> None:
    """Write the package into a directory. change: words of its module and their replacement."""
    module = directory / "flash_attn/cute"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("")
    (module / "interface.py").write_text(_INTERFACE.replace(*change))
    facts = directory / f"flash_attn_4-{VERSION}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: flash-attn-4\nVersion: {VERSION}\n"
    )
