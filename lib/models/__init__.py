"""Finds models by name, checks and builds them, and fills them with weights."""
