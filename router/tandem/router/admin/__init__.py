"""Operators' API of a router: the admin port, status, routing, audits, keys, SLO classes."""
