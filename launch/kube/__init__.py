"""Training jobs on Kubernetes: what is asked for, its manifest, and what became of it."""
