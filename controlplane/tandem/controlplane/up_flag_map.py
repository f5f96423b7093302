"""Map from each flag of `up` to its setting; in messages a setting is named by its flag, or its place in the file."""

from __future__ import annotations

from typing import Final

FLAGS: Final = {
    "--name": "name",
    "--state-dir": "state_dir",
    "--log-level": "log_level",
    "--log-format": "log_format",
    "--launcher": "launcher",
    "--patience": "patience",
    "--model": "model.path",
    "--revision": "model.revision",
    "--served-model-name": "model.served_names",
    "--chat-template": "model.chat_template",
    "--dtype": "model.dtype",
    "--quantize": "model.quantize",
    "--quantize-calibration": "model.quantize_calibration",
    "--max-model-len": "model.max_model_len",
    "--prefill": "pools.prefill",
    "--decode": "pools.decode",
    "--mixed": "pools.mixed",
    "--engine": "worker.engine",
    "--device": "worker.device",
    "--transport": "worker.transport",
    "--threads": "worker.threads",
    "--deterministic": "worker.is_deterministic",
    "--speculation": "worker.speculation",
    "--wire-codec": "worker.wire_codec",
    "--wire-codec-below": "worker.wire_codec_below_bytes_per_s",
    "--tp": "worker.tp",
    "--prefill-tp": "prefill.tp",
    "--decode-tp": "decode.tp",
    "--kv-dtype": "worker.kv_dtype",
    "--prefill-kv-dtype": "prefill.kv_dtype",
    "--decode-kv-dtype": "decode.kv_dtype",
    "--block-tokens": "worker.block_tokens",
    "--prefill-block-tokens": "prefill.block_tokens",
    "--decode-block-tokens": "decode.block_tokens",
    "--kv-memory": "worker.kv_memory_bytes",
    "--prefill-kv-memory": "prefill.kv_memory_bytes",
    "--decode-kv-memory": "decode.kv_memory_bytes",
    "--host": "router.host",
    "--port": "router.port",
    "--grpc-port": "router.grpc_port",
    "--admin-port": "router.admin_port",
    "--processes": "router.processes",
    "--tls-cert": "router.tls_cert",
    "--tls-key": "router.tls_key",
    "--anonymous": "router.anonymous",
    "--disaggregation": "router.disaggregation",
    "--redis": "redis.url",
    "--ray-address": "ray.address",
    "--ray-token-file": "ray.token_file",
    "--ray-host": "ray.host",
    "--ray-port": "ray.head_port",
    "--ray-cpus": "ray.cpus",
}
"""Flag of `clusterctl up` → "section.field" of the ClusterConfig, or its field. `--config`, `--fetch`,
`--timeout` and `--as-configured` set none."""

_BY_SETTING = {setting: flag for flag, setting in FLAGS.items()}


def name_of(setting: str) -> str:
    """Return how `setting` is given, such as "router.port": `--port`; one without a flag keeps its name."""
    return _BY_SETTING.get(setting, setting)
