"""Read the files and processes of a run, for monitor.py and stop.py."""
