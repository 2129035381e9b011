"""Draw charts and write pages of one HTML file, for runs and datasets alike."""
