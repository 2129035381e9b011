"""Holds what benchmarks start in processes of their own, and what several of them use."""
