"""Client-facing router: HTTP (OpenAI) and gRPC; tokenise, plan, dispatch, stream; the admin port. No torch in its
imports."""
