"""The shell around an engine: processes, gRPC server, streams, registration, heartbeat, and the Role protocol."""
