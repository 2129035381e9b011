"""Continue prompts with a model, as `python -m lib.generate` does."""
