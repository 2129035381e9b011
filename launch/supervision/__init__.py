"""Supervise a run on one node or many: judge failures, restart, and leave no process behind."""
