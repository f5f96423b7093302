"""Commands about where KV is and how fast it travels."""
