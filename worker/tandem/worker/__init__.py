"""The worker's executable: puts host, engine, transfer, index and roles together."""
