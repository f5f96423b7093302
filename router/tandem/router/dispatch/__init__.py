"""Dispatch of requests: sent to workers, put in order, tried again, and failed over when a worker fails."""
