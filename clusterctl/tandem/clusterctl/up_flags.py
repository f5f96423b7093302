"""Flags of `up` laid over a configuration file: a flag that is given wins, one that is not changes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.core import config_loader
from tandem.core.config import Anonymous, ClusterConfig, Disaggregation
from tandem.core.errors import ConfigError
from tandem.core.pairing import ALWAYS_BYTES_PER_S

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
    chat_template: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    prefill: int | None = None
    decode: int | None = None
    mixed: int | None = None
    engine: str | None = None
    device: str | None = None
    kv_memory: str | None = None
    block_tokens: int | None = None
    deterministic: bool | None = None
    transport: str | None = None
    threads: int | None = None
    tp: int | None = None
    prefill_tp: int | None = None
    decode_tp: int | None = None
    kv_dtype: str | None = None
    prefill_kv_dtype: str | None = None
    decode_kv_dtype: str | None = None
    prefill_block_tokens: int | None = None
    decode_block_tokens: int | None = None
    prefill_kv_memory: str | None = None
    decode_kv_memory: str | None = None
    wire_codec: str | None = None
    wire_codec_below: str | None = None
    host: str | None = None
    port: int | None = None
    grpc_port: int | None = None
    admin_port: int | None = None
    processes: int | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    anonymous: Anonymous | None = None
    disaggregation: Disaggregation | None = None
    redis: str | None = None

    def to_config(self) -> ClusterConfig:
        """The file's configuration, or the defaults, with these flags over it; raises ConfigError."""
        _check_text(self)
        base = config_loader.load(self.config, ClusterConfig) if self.config else ClusterConfig()
        config = _over(base, name=self.name, state_dir=self.state_dir, log_level=self.log_level)
        return dataclasses.replace(
            config,
            model=_over(
                base.model,
                path=self.model,
                revision=self.revision,
                served_names=self.served_model_name,
                chat_template=self.chat_template,
                dtype=self.dtype,
                max_model_len=self.max_model_len,
            ),
            pools=_over(base.pools, prefill=self.prefill, decode=self.decode, mixed=self.mixed),
            worker=_over(
                base.worker,
                engine=self.engine,
                device=self.device,
                kv_memory_bytes=_size(self.kv_memory, "--kv-memory"),
                block_tokens=self.block_tokens,
                tp=self.tp,
                kv_dtype=self.kv_dtype,
                wire_codec="" if self.wire_codec == "none" else self.wire_codec,
                wire_codec_below_bytes_per_s=self._codec_below(),
                is_deterministic=self.deterministic,
                transport=self.transport,
                threads=self.threads,
            ),
            prefill=_over(
                base.prefill,
                tp=self.prefill_tp,
                kv_dtype=self.prefill_kv_dtype,
                block_tokens=self.prefill_block_tokens,
                kv_memory_bytes=_size(self.prefill_kv_memory, "--prefill-kv-memory"),
            ),
            decode=_over(
                base.decode,
                tp=self.decode_tp,
                kv_dtype=self.decode_kv_dtype,
                block_tokens=self.decode_block_tokens,
                kv_memory_bytes=_size(self.decode_kv_memory, "--decode-kv-memory"),
            ),
            router=_over(
                base.router,
                host=self.host,
                port=self.port,
                grpc_port=self.grpc_port,
                admin_port=self.admin_port,
                processes=self.processes,
                tls_cert=_absolute(self.tls_cert),
                tls_key=_absolute(self.tls_key),
                anonymous=self.anonymous,
                disaggregation=self.disaggregation,
            ),
            redis=_over(base.redis, url=self.redis),
        )

    def _codec_below(self) -> float | None:
        """Bytes a second."""
        if self.wire_codec_below == "always":
            return ALWAYS_BYTES_PER_S
        return _size(self.wire_codec_below, "--wire-codec-below")


def _check_text(flags: UpFlags) -> None:
    """Configurations are handed over as UTF-8; bytes of the command line that are not come as lone surrogates."""
    for field in dataclasses.fields(flags):
        value = getattr(flags, field.name)
        for text in value if isinstance(value, tuple) else (value,):
            try:
                str(text).encode()
            except UnicodeEncodeError as error:
                flag = f"--{field.name.replace('_', '-')}"
                raise ConfigError(f"{flag} is {str(text)!r}", why="that is no UTF-8 text") from error


def _absolute(path: str | None) -> str | None:
    """Flags name files from where they are given; the router may run elsewhere."""
    return str(Path(path).expanduser().absolute()) if path else path


def _size(text: str | None, flag: str) -> int | None:
    return None if text is None else config_loader.parse_size(text, field=flag)


def _over(section: Section, **given: Any) -> Section:
    """A copy of `section` with the fields that are not None."""
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(section, **changes)  # type: ignore[type-var]
