"""Turns clients' requests, of any API, into work, and serves their answers."""
