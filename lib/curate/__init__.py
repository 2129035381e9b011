"""Curate a dataset: drop, label and mask rows of text or conversations (python -m lib.curate)."""
