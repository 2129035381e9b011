"""List the second tiers of vendors, by the scheme of the place that a run asks for.

A place is a directory on each node's own disk, or `<scheme>:<address>` for a vendor's tier.

A tier is only imported if a run asks for it, so that nothing here depends on its vendor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class VendorTier:
    """A tier, as `module:class`, and its needs.

    The class is called with the run, the address, and the steps between checkpoints. option: the
    field of the option that gives the address. address: a regular expression that addresses match.
    expected: the same in words. package: what it needs of requirements-optional.txt.
    """

    tier: str
    option: str
    address: str
    expected: str
    package: str


VENDOR_TIERS = {
    "hyperpod": VendorTier(
        "launch.cloud.checkpoints.hyperpod:HyperPodTier",
        "ckpt_hyperpod",
        r"auto|https?://[^/@\s]+/?",
        "auto, or one like http://host:9200",
        "amzn-sagemaker-checkpointing",
    )
}


VENDOR_OPTIONS = tuple(vendor.option for vendor in VENDOR_TIERS.values())


def find_place(options: Any) -> str | None:
    """Return the place of the second tier that the options of a run ask for, None without one."""
    for scheme, vendor in VENDOR_TIERS.items():
        if address := getattr(options, vendor.option):
            return f"{scheme}:{address}"
    return str(options.ckpt_local_dir) if options.ckpt_local_dir else None


def split_place(place: str) -> tuple[VendorTier | None, str]:
    """Return the vendor's tier of a place with its address, or None with the directory."""
    scheme, separator, address = place.partition(":")
    vendor = VENDOR_TIERS.get(scheme) if separator else None
    return (vendor, address) if vendor else (None, place)
