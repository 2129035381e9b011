"""Turn the text of a dataset into token ids, and into numbered samples and batches of them."""
