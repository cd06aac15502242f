"""Losses against a distribution per token: probability targets and distillation."""
