"""Which workers serve a request, and why. Pure: the simulator runs the same code, so nothing but core is imported."""
