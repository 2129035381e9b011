"""Write report.html, the page about a dataset: what was read, dropped and written, and why."""
