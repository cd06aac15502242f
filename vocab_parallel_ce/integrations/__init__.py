"""Integrations with training frameworks. Each one is opt-in: nothing is patched by an import."""
