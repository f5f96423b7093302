"""Requests on their way: sent to workers, put in order, tried again, and what becomes of them when a worker fails."""
