"""Settings that a revision may change, and the resulting configuration."""

from __future__ import annotations

import pytest

from tandem.core.config import ClusterConfig, RoleSection, WorkerSection
from tandem.core.errors import ConfigError
from tandem.core.revision_overrides import configured


def test_settings_lie_over_the_configuration() -> None:
    base = ClusterConfig(name="c", worker=WorkerSection(engine="sim"), decode=RoleSection(tp=2))
    found = configured(base, {
        "worker.chunk_tokens": "256", "worker.is_deterministic": "true", "worker.sim.decode_step_s": "0.5",
        "worker.transports": "shm, tcp", "decode.kv_memory_bytes": "64MiB", "worker.kv_dtype": "bfloat16",
    })  # fmt: skip
    assert (found.name, found.worker.engine, found.decode.tp) == ("c", "sim", 2)
    assert (found.worker.chunk_tokens, found.worker.is_deterministic, found.worker.kv_dtype) == (256, True, "bfloat16")
    assert found.worker.sim.decode_step_s == 0.5
    assert found.worker.transports == ("shm", "tcp")
    assert found.decode.kv_memory_bytes == 64 * 2**20
    assert configured(base, {}) == base


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"worker.chunk_token": "1"}, "Did you mean worker.chunk_tokens?"),
        ({"chunk_tokens": "1"}, "Did you mean worker.chunk_tokens?"),
        ({"worker.tp": "2"}, "TP and hardware belong to the pool"),
        ({"decode.hardware": "h200"}, "TP and hardware belong to the pool"),
        ({"router.port": "1"}, "is no setting of workers"),
        ({"": "1"}, "is no setting of workers"),
        ({"worker.sim": "1"}, "is no setting of workers"),
        ({"worker.chunk_tokens": "0"}, "worker.chunk_tokens is 0. Use 1 or more"),
        ({"worker.max_step_s": "nan"}, "worker.max_step_s is nan"),
        ({"worker.chunk_tokens": "many"}, "chunk_tokens"),
        ({"worker.kv_memory_bytes": "lots"}, "kv_memory_bytes is 'lots'"),
    ],
)
def test_what_a_revision_may_not_change(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configured(ClusterConfig(), settings)
    assert message in refused.value.message
