"""Save and load the state of a training run; a checkpoint is complete or does not exist."""
