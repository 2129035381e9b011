"""Write and read the files of a run."""
