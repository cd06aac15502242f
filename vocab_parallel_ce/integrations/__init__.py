"""Other frameworks with this package's loss: only on request, and undoable."""
