"""What cluster.py looks at."""
