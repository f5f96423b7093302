"""Flags of `up` laid over a configuration file: a flag that is given wins, one that is not changes nothing."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tandem.controlplane.up_flag_map import FLAGS
from tandem.core import config_loader
from tandem.core.config import Anonymous, ClusterConfig, Disaggregation, LauncherName, SpeculationMode
from tandem.core.errors import ConfigError
from tandem.core.files import expand_user, unwritable
from tandem.core.kv_compatibility import ALWAYS_BYTES_PER_S

_SIZES = ("--kv-memory", "--prefill-kv-memory", "--decode-kv-memory")
_FILES = ("--tls-cert", "--tls-key", "--ray-token-file")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpFlags:
    """The flags of the command line; None = not given. Each flag's place in the configuration: up_flag_map.py."""

    model: Annotated[
        str | None,
        typer.Option(help="Folder, GGUF file, hub id or name (see `models list`). Without it, smollm2 if it is here."),
    ] = None
    fetch: Annotated[
        bool, typer.Option("--fetch", help="Without --model: fetch smollm2 first, if it is missing and available.")
    ] = False
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API; may be given several times.")
    ] = None
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file to use in place of the model's chat template.")
    ] = None
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None
    mixed: Annotated[int | None, typer.Option(help="Number of workers that do both.")] = None
    disaggregation: Annotated[
        Disaggregation | None, typer.Option(help="When answers cross from a prefill to a decode worker.")
    ] = None
    host: Annotated[str | None, typer.Option(help="Address that the API listens on.")] = None
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API; 0 = any free one.")] = None
    grpc_port: Annotated[int | None, typer.Option(help="Port of the gRPC API. Without it, the one after --port.")] = (
        None
    )
    admin_port: Annotated[int | None, typer.Option(help="Admin port. Without it, the one after the gRPC port.")] = None
    processes: Annotated[
        int | None, typer.Option(help="Processes of the router, which share its ports; one a core is enough.")
    ] = None
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate of the API, with its chain, as PEM. Then it speaks TLS alone.")
    ] = None
    tls_key: Annotated[str | None, typer.Option(help="The certificate's private key, as PEM.")] = None
    anonymous: Annotated[
        Anonymous | None,
        typer.Option(
            help="When requests without an API key are let in: loopback (there, and no key yet), always, never."
        ),
    ] = None
    redis: Annotated[str | None, typer.Option(help="Redis URL. Without it, a private server is started.")] = None
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None
    quantize: Annotated[
        str | None,
        typer.Option(
            help="Weights of int8, w8a8, int4 or w4a16, made when a worker loads the model (CPU); auto = int8 where "
            "it is possible; none = as they are."
        ),
    ] = None
    quantize_calibration: Annotated[
        str | None,
        typer.Option(
            help="Text file such as the model will read and write: int8, int4 and w4a16 keep what matters there."
        ),
    ] = None
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens; 0 = the model's.")] = None
    kv_memory: Annotated[
        str | None, typer.Option(help="Memory for KV of each worker, such as 256MiB, or auto: from what is free.")
    ] = None
    prefill_kv_memory: Annotated[str | None, typer.Option(help="--kv-memory of prefill workers.")] = None
    decode_kv_memory: Annotated[str | None, typer.Option(help="--kv-memory of decode workers.")] = None
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of one KV block.")] = None
    prefill_block_tokens: Annotated[int | None, typer.Option(help="--block-tokens of prefill workers.")] = None
    decode_block_tokens: Annotated[
        int | None, typer.Option(help="--block-tokens of decode workers; KV is re-blocked on its way.")
    ] = None
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of stored KV: auto (as --dtype), float32, bfloat16 or float16.")
    ] = None
    prefill_kv_dtype: Annotated[str | None, typer.Option(help="--kv-dtype of prefill workers.")] = None
    decode_kv_dtype: Annotated[
        str | None, typer.Option(help="--kv-dtype of decode workers; KV is converted on its way.")
    ] = None
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism: processes of one worker that share the model.")
    ] = None
    prefill_tp: Annotated[int | None, typer.Option(help="--tp of prefill workers.")] = None
    decode_tp: Annotated[int | None, typer.Option(help="--tp of decode workers.")] = None
    wire_codec: Annotated[
        str | None, typer.Option(help="Compress KV on slow links: int8, fp8 or none. Answers may change slightly.")
    ] = None
    wire_codec_below: Annotated[
        str | None, typer.Option(help="A link measured below this many bytes/s is slow, such as 125MB; or always.")
    ] = None
    speculation: Annotated[
        SpeculationMode | None,
        typer.Option(
            help="Text that tokens are drafted from: prediction (the client's own), copy (that, and what prompt and "
            "answer repeat) or off. Answers stay the same."
        ),
    ] = None
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="Answers independent of batches (CPU)."),
    ] = None
    transport: Annotated[
        str | None,
        typer.Option(help="How KV travels: auto, or one of cuda_ipc, shm, tcp, grpc, gloo, cpu_ipc, nccl."),
    ] = None
    patience: Annotated[
        float | None,
        typer.Option(help="Factor on how long silence may last, for debuggers: 600. Failure detection is as slow."),
    ] = None
    engine: Annotated[
        str | None, typer.Option(help="model, or sim: KV by arithmetic, without weights; for trials and tests.")
    ] = None
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of a rank; 0 = cores / ranks of all workers.")
    ] = None
    launcher: Annotated[
        LauncherName | None, typer.Option(help="Where workers run: local, this machine; ray, all joined machines.")
    ] = None
    ray_address: Annotated[
        str | None, typer.Option(help="A running Ray cluster as HOST:PORT. Without it, --launcher ray starts a head.")
    ] = None
    ray_token_file: Annotated[
        str | None, typer.Option(help="File with that Ray cluster's token. Without it, one without tokens.")
    ] = None
    ray_host: Annotated[str | None, typer.Option(help="Address of this machine that others reach.")] = None
    ray_port: Annotated[int | None, typer.Option(help="Port of the Ray head; 0 = any free one.")] = None
    ray_cpus: Annotated[int | None, typer.Option(help="CPUs that workers on this machine share; 0 = its cores.")] = None
    name: Annotated[str | None, typer.Option(help="Name of the cluster; several can run side by side.")] = None
    state_dir: Annotated[str | None, typer.Option(help="Where state is kept [env: TANDEM_STATE_DIR].")] = None
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None
    log_format: Annotated[str | None, typer.Option(help="text, or json: one document a line.")] = None
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings; flags win over it.")] = None
    as_configured: Annotated[
        bool, typer.Option("--as-configured", help="Discard earlier scaling, flips and rollouts.")
    ] = False
    timeout: Annotated[float, typer.Option(help="Seconds after which a start that hangs fails.")] = 300.0

    def to_config(self) -> ClusterConfig:
        """Return the file's configuration, or the defaults, with these flags over it; raises ConfigError."""
        given = {_flag(field.name): getattr(self, field.name) for field in dataclasses.fields(self)}
        _check_text(given)
        config = config_loader.load(self.config, ClusterConfig) if self.config else ClusterConfig()
        for flag, setting in FLAGS.items():
            if given[flag] not in (None, []):
                config = _with(config, setting, _value(flag, given[flag]))
        return config


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with(config: ClusterConfig, setting: str, value: Any) -> ClusterConfig:
    """Return a copy of `config` with another value for `setting`, such as "router.port"."""
    section, _, field = setting.rpartition(".")
    if section:
        field, value = section, dataclasses.replace(getattr(config, section), **{field: value})
    return dataclasses.replace(config, **{field: value})


def _value(flag: str, given: Any) -> Any:
    """Return the given value as the configuration has it."""
    if flag in _FILES and given:  # they are named from here; the router may run elsewhere
        return str(expand_user(given).absolute())
    if flag == "--wire-codec-below" and given == "always":
        return ALWAYS_BYTES_PER_S
    if flag in _SIZES and given == "auto":
        return 0
    if flag in (*_SIZES, "--wire-codec-below"):
        return config_loader.parse_size(given, field=flag)
    if flag == "--wire-codec" and given == "none":
        return ""
    return tuple(given) if isinstance(given, list) else given


def _check_text(given: dict[str, Any]) -> None:
    """Configurations are handed over as UTF-8; bytes of the command line that are not come as lone surrogates."""
    for flag, value in given.items():
        for text in value if isinstance(value, list) else (value,):
            if why := unwritable(str(text)):
                raise ConfigError(f"{flag} is {str(text)!a}", why=why)
