"""What a router measures, in Prometheus' form."""
