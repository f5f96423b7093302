"""The host of an engine: processes, gRPC server, streams, registration, heartbeat, and the Role protocol."""
