"""Estimates of the memory and time that a run will need."""
