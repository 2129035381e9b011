"""Holds what build_image.py is made of."""
