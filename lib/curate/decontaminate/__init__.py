"""Compare documents with the questions of test sets, and report which questions occur in them."""
