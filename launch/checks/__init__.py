"""Measures and judges machines, networks and checkouts for check.py."""
