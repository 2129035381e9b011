"""Memory and time, ahead of a run."""
