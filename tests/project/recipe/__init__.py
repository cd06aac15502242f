"""The two files that a new loss brings by CONTRIBUTING's recipe."""
