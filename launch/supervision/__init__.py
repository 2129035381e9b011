"""Keeps a run going on one node or many: in rounds, by their causes, with no process left."""
