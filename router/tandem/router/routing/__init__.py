"""Chooses the workers of a request. Pure: the simulator runs the same code, so nothing but core is imported."""
