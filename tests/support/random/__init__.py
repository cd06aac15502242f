"""Random calls of the public functions."""
