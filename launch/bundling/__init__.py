"""Making the bundle of an air-gapped site."""
