"""Write all that a run reports: rows, log, events, state, metrics, pages; run the end command."""
