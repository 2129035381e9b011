"""The sources of samples: prepared datasets, raw text that is streamed, synthetic tokens."""
