"""The parts of `scripts/train_lm.py`: text as token ids, a model sharded over its vocabulary."""
