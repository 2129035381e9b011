"""Second tiers of checkpoints that only a vendor offers, for lib/checkpoints/vendor_tiers.py."""
