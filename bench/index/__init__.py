"""The router's replica of the prefix index: time of a lookup, memory under many prefixes, events a second."""
