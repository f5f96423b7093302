"""Decides how many workers of each role a cluster should have: pure decisions over the load of the last minutes.

    Observation ──▶ replay of the last minutes for every split ──▶ Planner.decide ──▶ Decision, with reason and figures

Imports `core` alone: a running cluster (live_planner.py), the simulator and `clusterctl plan` ask the same code. See
docs/planning.md.
"""
