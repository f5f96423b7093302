"""A cluster on virtual time: real policies, queues, schedulers, ledgers and index; computing and wires by arithmetic.

What is real and what is modelled: docs/simulator.md.
"""
