"""Triton kernels for the operations of ``evolve``. They never import ``evolve``."""
