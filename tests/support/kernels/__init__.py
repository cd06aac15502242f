"""Kernels: interpreted, compiled for other GPUs, and which of them were launched."""
