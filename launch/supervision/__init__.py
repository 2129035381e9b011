"""What keeps a run going on one node or many: rounds, causes, restarts, and no process left."""
