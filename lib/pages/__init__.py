"""Draw charts and write pages of one HTML file. Knows no run and no corpus."""
