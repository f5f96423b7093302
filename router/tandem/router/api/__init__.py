"""Client-facing servers: the HTTP API, the gRPC API, and the sockets of both."""
