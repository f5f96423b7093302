"""What operators see and change: the admin port, status, routing, audits, keys, promises."""
