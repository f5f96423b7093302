"""The global prefix index: block events, membership and leases of workers, and the replica of each router."""
