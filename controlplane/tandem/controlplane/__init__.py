"""Starts and keeps a cluster running: launchers, the reconcile loop, the steps of `up`. Serves no request itself."""
