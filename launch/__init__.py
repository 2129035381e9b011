"""Starts, watches and carries the stages: on single nodes, on clusters and across air gaps."""
