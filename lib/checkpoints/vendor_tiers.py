"""List the second tiers of vendors, by the field of the option that gives their address.

A tier is only imported if a run asks for it, so that nothing here depends on its vendor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VendorTier:
    """A tier, as `module:class`, and its needs.

    The class is called with the address, the experiment's name, the run's ID, the groups `control`
    and `saving`, and `note`. address: a regular expression that addresses match. expected: the same
    in words. package: what it needs of requirements-optional.txt.
    """

    tier: str
    address: str
    expected: str
    package: str


VENDOR_TIERS = {
    "ckpt_hyperpod": VendorTier(
        "launch.cloud.checkpoints.hyperpod:HyperPodTier",
        r"auto|https?://[^/@\s]+/?",
        "auto, or one like http://host:9200",
        "amzn-sagemaker-checkpointing",
    )
}


def find_requested(options: object) -> tuple[str, str] | None:
    """Return the field of the vendor's option that is set, and its value; None without one."""
    for name in VENDOR_TIERS:
        if address := getattr(options, name):
            return name, address
    return None
