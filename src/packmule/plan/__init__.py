"""Choosing a plan: candidates, bounds, simulation, explanation. No torch."""
