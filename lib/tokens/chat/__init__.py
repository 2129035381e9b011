"""From conversations to samples, and to which of their tokens are trained."""
