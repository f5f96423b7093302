"""Clients that leave at random moments: within a second nothing of them is left at the router or the workers."""
