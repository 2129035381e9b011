"""What preflight.py measures and judges."""
