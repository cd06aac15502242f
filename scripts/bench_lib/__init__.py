"""The parts of ``scripts/bench.py``."""
