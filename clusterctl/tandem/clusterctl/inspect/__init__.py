"""Commands that show what a cluster is and does."""
