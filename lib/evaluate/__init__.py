"""Evaluate a model on a suite of tasks: rank choices, and bits per byte of answers."""
