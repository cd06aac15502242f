"""Triton kernels and their launchers: only modules in here import triton, and only when a kernel runs."""
