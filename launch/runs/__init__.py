"""Show the files of runs in a terminal: one run, or a table of runs."""
