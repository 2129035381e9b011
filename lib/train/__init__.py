"""The parts that the training loop of stage 04 calls."""
