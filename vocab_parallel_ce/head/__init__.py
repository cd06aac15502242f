"""The head and its loss together, whose logits are made in chunks of tokens."""
