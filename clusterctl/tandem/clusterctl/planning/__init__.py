"""Commands for planning, before there is a cluster."""
