"""Commands about this program and its settings."""
