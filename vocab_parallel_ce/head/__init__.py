"""The head and its loss together: the logits of all tokens never exist."""
