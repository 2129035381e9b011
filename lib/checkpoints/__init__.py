"""Training state on disk: written whole or not at all."""
