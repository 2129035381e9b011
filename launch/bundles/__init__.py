"""Makes the bundle of an air-gapped site."""
