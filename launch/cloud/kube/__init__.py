"""Run training jobs on Kubernetes: options, manifests, submission and the causes of failures."""
