"""All other data that a cluster keeps in Redis: desired state, keys, budgets, measured links, data of clients."""
