"""Integrations with other libraries, each imported only by name."""
