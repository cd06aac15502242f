"""Random calls and random programs of the public functions."""
