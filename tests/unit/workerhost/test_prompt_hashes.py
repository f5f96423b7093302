"""A prompt is hashed once, when it comes; every later step finds the hashes with it."""

from __future__ import annotations

from tandem.core.block_hash import chain
from tests.unit.engine.simulation import prompt_of
from tests.unit.simulation.crowd import Crowd


def test_a_request_brings_its_hashes_along() -> None:
    crowd = Crowd(blocks=16, max_tokens=8)
    crowd.wish("p0", 12)
    (tracked,) = crowd.worker.context.requests.all()
    request, size = tracked.engine_request, crowd.shape.groups[0].block_tokens
    assert request.prompt == tuple(prompt_of(12, seed=0))
    assert list(request.hashes) == chain(request.hash_root, request.prompt, size) != []
    crowd.close()


def test_hashes_do_not_outlive_their_root() -> None:
    crowd = Crowd(blocks=16, max_tokens=8)
    crowd.wish("p0", 12)
    (tracked,) = crowd.worker.context.requests.all()
    request = tracked.engine_request
    assert request.under(request.hash_root) is request
    lossy = crowd.worker.context.hash_root(b"", lossy="int8")
    assert (request.under(lossy).hash_root, request.under(lossy).hashes) == (lossy, ())
    crowd.close()
