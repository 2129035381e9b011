"""Check machines, networks and checkouts, for launch/check.py."""
