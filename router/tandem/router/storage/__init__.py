"""Clients' stored data: files, and batches that run in the gaps."""
