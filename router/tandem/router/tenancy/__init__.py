"""Tenants of requests: API keys, budgets, and the salts that keep tenants' cached blocks apart."""
