"""The operators' page at /ui: its files, the stream that keeps it up to date, and its way to the API."""
