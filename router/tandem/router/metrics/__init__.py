"""Metrics of a router, in Prometheus' form."""
