"""From a tree of raw files to Arrow shards of text."""
