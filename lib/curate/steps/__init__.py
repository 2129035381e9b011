"""The steps of a curation, each a filter, a label, a choice among all rows, or a mask."""
