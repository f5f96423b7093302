"""Open-loop load on any OpenAI endpoint: request plans, timing, results."""
