"""Starts and keeps a cluster running: launchers, the reconcile loop, what `up` does. Serves no request itself."""
