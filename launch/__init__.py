"""Starting, watching and carrying the stages: single nodes, clusters, air gaps."""
