"""Runs training jobs on Kubernetes, from their options to what became of them."""
