"""Finds models by name, checks, builds and adapts them, and fills them with weights."""
