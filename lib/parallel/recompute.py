"""What a decoder block computes again in the backward pass, instead of keeping it from forward."""

from __future__ import annotations

# Nothing; what is cheap; all but the block's input. Each needs less memory and more time.
KINDS = ("none", "selective", "full")
