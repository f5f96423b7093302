"""Moving KV blocks between workers: layout maths, the transfer state machine, transports.

Knows no models and no HTTP. The core, `shm`, `tcp` and `grpc` work on plain buffers and import no torch.
"""
