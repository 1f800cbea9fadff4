"""Frozen records that cross modules; units; parsing and printing. No torch, no I/O.

The only place that reads environment variables is `packmule.spec.environment`.
Import the submodules directly: they load pydantic, which the command line delays.
"""
