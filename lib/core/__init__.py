"""What every stage stands on: standard library only, no torch, no Hugging Face at import."""
