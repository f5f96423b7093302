"""`clusterctl up | down | status | net | kv | route | key | slo`. Exit codes: 0 done, 1 failed, 2 wrong usage.

2 is also for what did not start. `kv audit` has its own (kv.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from tandem.clusterctl import key, kv, net, route, slo, status_view
from tandem.clusterctl.admin_client import AdminClient
from tandem.clusterctl.flags import AsJson, Endpoint, KeyFile, Name, StateDirFlag
from tandem.clusterctl.up_flags import UpFlags
from tandem.core.config import DEFAULT_CLUSTER, Anonymous, Disaggregation
from tandem.core.errors import ConfigError, StartupError, TandemError, UnavailableError

_STARTED_S = time.monotonic()
_FILE_WIDTH = 200
EXIT_FAILED = 1
EXIT_STARTUP = 2

app = typer.Typer(
    help="Run and steer Tandem clusters.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

app.add_typer(kv.app, name="kv")
app.add_typer(route.app, name="route")
app.add_typer(key.app, name="key")
app.add_typer(slo.app, name="slo")
app.command()(net.net)


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Model folder or hub id. Without it, the bundled model.")] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in the API; may be given several times.")
    ] = None,
    chat_template: Annotated[
        str | None, typer.Option(help="Jinja file to use in place of the model's chat template.")
    ] = None,
    prefill: Annotated[int | None, typer.Option(help="Number of prefill workers.")] = None,
    decode: Annotated[int | None, typer.Option(help="Number of decode workers.")] = None,
    mixed: Annotated[int | None, typer.Option(help="Number of workers that do both.")] = None,
    disaggregation: Annotated[
        Disaggregation | None, typer.Option(help="When answers cross from a prefill to a decode worker.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address that the API listens on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API; 0 = any free one.")] = None,
    grpc_port: Annotated[
        int | None, typer.Option(help="Port of the gRPC API. Without it, the one after --port.")
    ] = None,
    admin_port: Annotated[int | None, typer.Option(help="Admin port. Without it, the one after the gRPC port.")] = None,
    processes: Annotated[
        int | None, typer.Option(help="Processes of the router, which share its ports; one a core is enough.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(help="Certificate of the API, with its chain, as PEM. Then it speaks TLS alone.")
    ] = None,
    tls_key: Annotated[str | None, typer.Option(help="The certificate's private key, as PEM.")] = None,
    anonymous: Annotated[
        Anonymous | None,
        typer.Option(
            help="When requests without an API key are let in: loopback (there, and no key yet), always, never."
        ),
    ] = None,
    redis: Annotated[str | None, typer.Option(help="Redis URL. Without it, a private server is started.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens; 0 = the model's.")] = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for KV of each worker, such as 256MiB.")] = None,
    prefill_kv_memory: Annotated[str | None, typer.Option(help="--kv-memory of prefill workers.")] = None,
    decode_kv_memory: Annotated[str | None, typer.Option(help="--kv-memory of decode workers.")] = None,
    block_tokens: Annotated[int | None, typer.Option(help="Tokens of one KV block.")] = None,
    prefill_block_tokens: Annotated[int | None, typer.Option(help="--block-tokens of prefill workers.")] = None,
    decode_block_tokens: Annotated[
        int | None, typer.Option(help="--block-tokens of decode workers; KV is re-blocked on its way.")
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="Type of stored KV: auto (as --dtype), float32, bfloat16 or float16.")
    ] = None,
    prefill_kv_dtype: Annotated[str | None, typer.Option(help="--kv-dtype of prefill workers.")] = None,
    decode_kv_dtype: Annotated[
        str | None, typer.Option(help="--kv-dtype of decode workers; KV is converted on its way.")
    ] = None,
    tp: Annotated[
        int | None, typer.Option(help="Tensor parallelism: processes of one worker that share the model.")
    ] = None,
    prefill_tp: Annotated[int | None, typer.Option(help="--tp of prefill workers.")] = None,
    decode_tp: Annotated[int | None, typer.Option(help="--tp of decode workers.")] = None,
    wire_codec: Annotated[
        str | None, typer.Option(help="Compress KV on slow links: int8, fp8 or none. Answers may change slightly.")
    ] = None,
    wire_codec_below: Annotated[
        str | None, typer.Option(help="A link measured below this many bytes/s is slow, such as 125MB; or always.")
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option("--deterministic/--no-deterministic", help="Answers independent of batches (fp32, CPU)."),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="How KV travels: auto, or one of cuda_ipc, shm, tcp, grpc, gloo, cpu_ipc, nccl."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="model, or sim: KV by arithmetic, without weights; for trials and tests.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of a rank; 0 = cores / ranks of all workers.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the cluster; several can run side by side.")] = None,
    state_dir: Annotated[str | None, typer.Option(help="Where state is kept [env: TANDEM_STATE_DIR].")] = None,
    log_level: Annotated[str | None, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with these settings; flags win over it.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which a start that hangs is given up.")] = 300.0,
) -> None:
    """Start a cluster on this machine and keep it running in the foreground; Ctrl-C stops it."""
    from tandem.cluster.environment import Environment
    from tandem.cluster.up import UpOptions
    from tandem.cluster.up import up as run

    flags = UpFlags(
        model=model, revision=revision, served_model_name=tuple(served_model_name) if served_model_name else None,
        chat_template=chat_template, prefill=prefill, decode=decode, mixed=mixed,
        disaggregation=disaggregation, host=host, port=port, grpc_port=grpc_port, admin_port=admin_port,
        processes=processes, tls_cert=tls_cert, tls_key=tls_key,
        anonymous=anonymous, redis=redis, dtype=dtype, max_model_len=max_model_len, kv_memory=kv_memory,
        block_tokens=block_tokens, deterministic=deterministic, transport=transport,
        prefill_kv_memory=prefill_kv_memory, decode_kv_memory=decode_kv_memory,
        prefill_block_tokens=prefill_block_tokens, decode_block_tokens=decode_block_tokens,
        kv_dtype=kv_dtype, prefill_kv_dtype=prefill_kv_dtype, decode_kv_dtype=decode_kv_dtype,
        tp=tp, prefill_tp=prefill_tp, decode_tp=decode_tp,
        wire_codec=wire_codec, wire_codec_below=wire_codec_below, engine=engine,
        device=device, threads=threads, name=name, state_dir=state_dir, log_level=log_level, config=config,
    )  # fmt: skip
    if not timeout > 0:
        raise ConfigError(f"--timeout is {timeout:g}", todo="Use more than 0 seconds")
    try:
        run(flags.to_config(), Environment.read(), _TerminalProgress(), UpOptions(ready_timeout_s=timeout))
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_FAILED) from None


@app.command()
def down(
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    timeout: Annotated[float, typer.Option(help="Seconds to wait until everything is gone.")] = 60.0,
) -> None:
    """Stop a cluster and wait until it is gone."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        admin.down()
        if not admin.wait_gone(timeout):
            raise UnavailableError(
                f"the cluster at {admin.endpoint} still runs after {timeout:g} s", todo="Look into its logs"
            )
    print("stopped")


@app.command()
def status(
    name: Name = DEFAULT_CLUSTER,
    state_dir: StateDirFlag = "",
    endpoint: Endpoint = "",
    admin_key_file: KeyFile = "",
    as_json: AsJson = False,
) -> None:
    """Show what runs."""
    with AdminClient.find(endpoint=endpoint, admin_key_file=admin_key_file, name=name, state_dir=state_dir) as admin:
        found = admin.status()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        status_view.show(found, Console(width=None if sys.stdout.isatty() else _FILE_WIDTH))


class _TerminalProgress:
    """A line for every step, with the seconds since the start; lines without a part are there to be copied."""

    def __init__(self) -> None:
        self._console = _Terminal(highlight=False, soft_wrap=True)

    def say(self, part: str, text: str) -> None:
        line = Text(text)
        if part:
            stamp = Text(f"{time.monotonic() - _STARTED_S:7.2f} s  ", style="dim")
            line = stamp + Text(f"{part:<11} ", style="bold") + line
        try:
            self._console.print(line)
        except OSError:  # the terminal is gone
            self._console.quiet = True


class _Terminal(Console):
    """Falls silent when nobody reads any more, instead of ending the program as rich does."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main() -> None:
    """Entry point of the `clusterctl` program."""
    try:
        app()
    except TandemError as error:
        print(f"clusterctl: {error.message}", file=sys.stderr)
        sys.exit(EXIT_STARTUP if isinstance(error, StartupError) else EXIT_FAILED)
    except OSError as error:
        what = f"cannot use {error.filename}: " if error.filename else ""
        print(f"clusterctl: {what}{error.strerror or error}.", file=sys.stderr)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
