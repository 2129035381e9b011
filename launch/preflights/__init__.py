"""Measures and judges what preflight.py reports."""
