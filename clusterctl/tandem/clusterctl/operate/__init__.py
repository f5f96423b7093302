"""Commands that change the desired state of a cluster, and how they wait for it."""
