"""Distribute a model over many devices, and choose the kernels that compute it."""
