"""The losses: for each what it checks, what stands alongside the logits, and its launchers."""
