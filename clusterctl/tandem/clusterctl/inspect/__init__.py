"""Commands that show the state and activity of a cluster."""
