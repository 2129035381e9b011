"""Turn a tree of raw files into a dataset of Arrow shards (stages 01 and 02)."""
