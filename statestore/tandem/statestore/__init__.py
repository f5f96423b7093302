"""Who holds which block, who is alive and what is wanted: everything that Tandem keeps in Redis, and reads from it.

Owns the keys, scripts and record formats, and the routers' in-memory replica of the index. The index is advice: the
worker that owns a block checks before it is used, and without Redis routers go on with load alone.
"""
