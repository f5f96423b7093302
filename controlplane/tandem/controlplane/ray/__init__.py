"""Workers placed by Ray: the launcher, and the programs that it needs around Ray. Tokens and KV never pass through Ray.

`ray` is imported by `driver`, `placement` and `agent` alone, which run in processes of their own: a Ray that ends its
process, as it does when its head is gone for long, ends neither the controller nor the router.
"""
