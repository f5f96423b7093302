"""Overload on sim workers: what is still served as promised at twice the capacity, and what a flood does to others."""
