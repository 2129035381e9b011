"""Rules of stage 02 that judge a text by its words and lines, as published corpora use them."""
