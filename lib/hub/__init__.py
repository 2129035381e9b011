"""The network: what stage 03 and --online fetch."""
