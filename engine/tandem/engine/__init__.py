"""Model execution on one tensor-parallel group: models, weights, KV pools, prefix cache, scheduler, sampler.

Knows no network and no roles. Everything here is driven by one thread, the step loop.
"""
