"""Write the log, rows, events, state, metrics and pages of a run, and run its end command."""
