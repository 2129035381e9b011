"""Rules that judge a text by its words and lines, as published corpora use them."""
