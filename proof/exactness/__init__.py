"""Exactness of the disaggregated path against transformers in fp32: log-probabilities, greedy tokens, KV bytes."""
