"""Classify rows by language and quality with fastText models."""
