"""Inputs, and one call of each kind over them."""
