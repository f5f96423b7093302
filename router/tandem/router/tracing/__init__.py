"""Traces of API calls for receivers of OpenTelemetry, made of what the dispatcher keeps anyway.
Nothing is measured anew. The SDK is imported when tracing is on. Never prompts, tokens, headers or keys."""
