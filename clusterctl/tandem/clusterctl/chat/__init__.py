"""Conversations with a model in a terminal, and single answers for scripts."""
