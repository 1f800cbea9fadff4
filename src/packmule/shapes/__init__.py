"""Architectures as numbers: parameters, layouts, saved and scratch tensors. No torch."""
