"""Commands that answer before there is a cluster."""
