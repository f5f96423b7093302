"""Batches: many requests in one file, run in the gaps that interactive traffic leaves, each answered exactly once."""
