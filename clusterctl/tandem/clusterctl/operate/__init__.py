"""Commands that change what is wanted of a cluster, and how they wait for it."""
