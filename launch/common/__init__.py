"""Holds what several launchers use."""
