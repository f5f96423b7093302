"""A model replaced by arithmetic, so that everything around it can be run and proven without weights.

Each token has a 64-bit hash, chained from the hash that is *read back* from the slot of the token before. It is written
into the token's KV slot of every layer, plane and head, each in its own disguise. The next token is a function of a
digest over the KV of the whole context, read back through the block tables: any wrong, stale, missing, misplaced or
partial block changes the answer. Block size, chunking, batching, TP and KV dtype do not.

    arithmetic         the hashes, the digest, the choice of a token; the oracle, which uses no blocks
    pool               one KV group on one rank: writing slots as floats that every lossless codec keeps, judging blocks
    digest_all_gather  gathers the ranks' digests (the only importer of torch, for gloo)
    runner             the engine's `Runner`, with modelled durations
"""
