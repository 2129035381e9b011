"""Start and watch the stages on single nodes and clusters, and carry them across air gaps."""
