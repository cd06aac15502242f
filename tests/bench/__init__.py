"""Tests of ``scripts/bench.py``."""
