"""Training in a cloud: jobs on Kubernetes, images, clusters of AWS. Nothing outside imports it."""
