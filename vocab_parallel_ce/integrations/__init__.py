"""Frameworks: each module is switched on by name, imports its framework only then, and can be undone."""
