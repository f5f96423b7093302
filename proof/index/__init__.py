"""Random deaths and losses around the prefix index: it finds back within the lease time, and is never wrong after."""
