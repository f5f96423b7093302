"""Types and rules that every Tandem component shares. Standard library only; no torch, grpc, ray or redis."""
