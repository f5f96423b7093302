"""Routing policies on virtual time: hit rate, TTFT, waits and imbalance of each, on one trace."""
