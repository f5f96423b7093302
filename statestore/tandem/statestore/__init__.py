"""Block index, leases, desired state: everything that Tandem keeps in Redis, and reads from it.

Owns the keys, scripts and record formats, and the routers' in-memory replica of the index. The index is advice: the
worker that owns a block checks before use, and without Redis routers plan by load alone.
"""
