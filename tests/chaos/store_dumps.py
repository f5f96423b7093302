"""Dumps of workers' and routers' keys in Redis, taken out and put back: emptied, or as it was some time ago.

The desired state stays as it is: it belongs to the durable store, which may be the same server.
"""

import redis

Dump = dict[bytes, tuple[bytes, int]]
"""By key: the value of `DUMP`, and the milliseconds that it had left (0 = for ever)."""
_DURABLE = b":desired"


def dump(server: redis.Redis) -> Dump:
    """Every key but the desired state, with the time that it had left."""
    found: Dump = {}
    for key in server.scan_iter():
        payload, left_ms = server.dump(key), server.pttl(key)
        if payload is not None and not key.endswith(_DURABLE):
            found[key] = (payload, max(0, int(left_ms)))
    return found


def put(server: redis.Redis, old: Dump) -> None:
    """These keys are back, in one step; all others stay as they are."""
    with server.pipeline(transaction=True) as pipeline:
        _restore(pipeline, old)
        pipeline.execute()


def restore(server: redis.Redis, old: Dump) -> None:
    """Nothing but these keys, in one step."""
    gone = [key for key in server.scan_iter() if not key.endswith(_DURABLE)]
    with server.pipeline(transaction=True) as pipeline:
        if gone:
            pipeline.delete(*gone)
        _restore(pipeline, old)
        pipeline.execute()


def _restore(pipeline: redis.client.Pipeline, old: Dump) -> None:
    for key, (payload, left_ms) in old.items():
        pipeline.restore(key, left_ms, payload, replace=True)
