"""List the second tiers of vendors, by the scheme of the place in --ckpt-local-dir.

A place is a directory on each node's own disk, or `<scheme>:<address>` for a vendor's tier.

A tier is only imported if a run asks for it, so that nothing here depends on its vendor.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VendorTier:
    """A tier, as `module:class`, and its needs.

    The class is called with the run, the address, and the steps between checkpoints. address: a
    regular expression that addresses match. expected: a phrase that describes them. package: the
    package of requirements-optional.txt that the tier needs.
    """

    tier: str
    address: str
    expected: str
    package: str


VENDOR_TIERS = {
    "hyperpod": VendorTier(
        "launch.cloud.checkpoints.hyperpod:HyperPodTier",
        r"auto|https?://[^/@\s]+/?",
        "hyperpod:auto, or one like hyperpod:http://host:9200",
        "amzn-sagemaker-checkpointing",
    )
}


def split_place(place: str) -> tuple[VendorTier | None, str]:
    """Return the vendor's tier of a place with its address, or None with the directory."""
    scheme, separator, address = place.partition(":")
    vendor = VENDOR_TIERS.get(scheme) if separator else None
    return (vendor, address) if vendor else (None, place)
