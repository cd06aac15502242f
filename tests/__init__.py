"""Tests. What they share is in ``tests.support``; the lanes they run in are in ``conftest.py``."""
