"""All else that a cluster keeps in Redis: desired state, keys, budgets, measured links, what clients leave."""
