"""Commands that start, join and stop a cluster."""
