"""Download models and datasets for stage 03 and `--online`."""
