"""What listens to clients: the HTTP API, the gRPC API, and the sockets of both."""
