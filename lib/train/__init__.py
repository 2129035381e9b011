"""Provide the functions and classes that the training loop of stage 04 uses."""
