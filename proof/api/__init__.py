"""Ten minutes of schemathesis: no failure of the server's own, and no answer that /openapi.json does not describe."""
