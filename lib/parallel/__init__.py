"""One model over many devices: who holds what, and how it computes."""
