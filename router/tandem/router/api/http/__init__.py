"""The OpenAI-compatible HTTP API: schemas and responses only; everything else is shared with gRPC."""
