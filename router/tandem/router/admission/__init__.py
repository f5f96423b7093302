"""Admission control: dispatch, queue, or reject a request, and its SLO terms. Pure, for the simulator, too."""
