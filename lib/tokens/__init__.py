"""From text to numbered samples of token ids."""
