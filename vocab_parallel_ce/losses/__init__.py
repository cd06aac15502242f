"""The losses: for each what it checks, what stands beside the logits, and its launchers."""
