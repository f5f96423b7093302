"""Loads for any OpenAI endpoint, open-loop: what is sent when, how it is timed, and what that comes to."""
