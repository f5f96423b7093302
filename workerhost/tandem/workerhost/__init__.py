"""The host process of a worker: rank processes, gRPC server, streams, registration, heartbeat, drain, role changes."""
