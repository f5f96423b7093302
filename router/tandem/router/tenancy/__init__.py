"""Whose request it is: API keys, budgets, and the salts that keep tenants' cached blocks apart."""
