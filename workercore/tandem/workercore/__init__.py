"""The rank process of a worker: step loop, role interface, prefix fetches, transfer leases and the message ring."""
