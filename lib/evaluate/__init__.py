"""Evaluate a model on a suite of tasks: accuracy of its choices, and bits per byte of answers."""
