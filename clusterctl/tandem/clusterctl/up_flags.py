"""Flags of `up` laid over a configuration file: a flag that is given wins, one that is not changes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.core import config_loader
from tandem.core.config import ClusterConfig, Disaggregation

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFlags:
    """What was given on the command line; None = not given."""

    config: Path | None = None
    name: str | None = None
    state_dir: str | None = None
    log_level: str | None = None
    model: str | None = None
    revision: str | None = None
    served_model_name: tuple[str, ...] | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    prefill: int | None = None
    decode: int | None = None
    mixed: int | None = None
    device: str | None = None
    kv_memory: str | None = None
    block_tokens: int | None = None
    deterministic: bool | None = None
    transport: str | None = None
    threads: int | None = None
    host: str | None = None
    port: int | None = None
    grpc_port: int | None = None
    admin_port: int | None = None
    disaggregation: Disaggregation | None = None
    redis: str | None = None

    def to_config(self) -> ClusterConfig:
        """The file's configuration, or the defaults, with these flags over it; raises ConfigError."""
        base = config_loader.load(self.config, ClusterConfig) if self.config else ClusterConfig()
        kv_memory_bytes = None
        if self.kv_memory is not None:
            kv_memory_bytes = config_loader.parse_size(self.kv_memory, field="--kv-memory")
        config = _over(base, name=self.name, state_dir=self.state_dir, log_level=self.log_level)
        return dataclasses.replace(
            config,
            model=_over(
                base.model,
                path=self.model,
                revision=self.revision,
                served_names=self.served_model_name,
                dtype=self.dtype,
                max_model_len=self.max_model_len,
            ),
            pools=_over(base.pools, prefill=self.prefill, decode=self.decode, mixed=self.mixed),
            worker=_over(
                base.worker,
                device=self.device,
                kv_memory_bytes=kv_memory_bytes,
                block_tokens=self.block_tokens,
                is_deterministic=self.deterministic,
                transport=self.transport,
                threads=self.threads,
            ),
            router=_over(
                base.router,
                host=self.host,
                port=self.port,
                grpc_port=self.grpc_port,
                admin_port=self.admin_port,
                disaggregation=self.disaggregation,
            ),
            redis=_over(base.redis, url=self.redis),
        )


def _over(section: Section, **given: Any) -> Section:
    """A copy of `section` with the fields that are not None."""
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(section, **changes)  # type: ignore[type-var]
