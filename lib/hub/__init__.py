"""Fetches what stage 03 and --online need of the network."""
