"""Turns a tree of raw files into Arrow shards of text."""
