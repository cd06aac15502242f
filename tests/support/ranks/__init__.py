"""Ranks in processes and in turn, what they send, and calls on them."""
