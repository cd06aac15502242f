"""What a call must return, and how near to it."""
