"""Packmule fits large-model work into the hardware you have."""

__version__ = "0.1.0"
