"""Opens the launcher that the configuration names."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from tandem.controlplane.environment import Environment
from tandem.controlplane.launcher import Launcher
from tandem.controlplane.local import LocalLauncher
from tandem.controlplane.prog_name import called
from tandem.controlplane.ray.head_process import RayHead
from tandem.controlplane.ray.launcher import RayLauncher, check_installed
from tandem.controlplane.state_dir import HeldState
from tandem.core.config import ClusterConfig, LauncherName


@contextlib.asynccontextmanager
async def opened(
    config: ClusterConfig,
    held: HeldState,
    environment: Environment,
    *,
    command: Sequence[str],
    hurry: asyncio.Event,
    say: Callable[[str, str], None],
) -> AsyncIterator[Launcher]:
    """Open the launcher for as long as the block runs. `command` starts a local worker. StartupError if it cannot
    be."""
    if config.launcher is LauncherName.LOCAL:
        async with LocalLauncher(held, environment, command=command, hurry=hurry) as local:
            yield local
        return
    check_installed()
    async with contextlib.AsyncExitStack() as stack:
        address, token_file, node_ip = config.ray.address, config.ray.token_file, ""
        if not address:
            say("ray", "starting a head")
            head = await stack.enter_async_context(
                RayHead(
                    held, environment, config.ray, cluster=config.name, say=lambda text: say("ray", text), hurry=hurry
                )
            )
            address, token_file, node_ip = head.address, str(head.token_file), head.address.rpartition(":")[0]
            say("ray", f"another machine joins with `{called()} join {address} --token-file FILE`; copy {token_file}")
        yield await stack.enter_async_context(
            RayLauncher(
                held,
                environment,
                cluster=config.name,
                address=address,
                token_file=token_file,
                place_timeout_s=config.ray.place_timeout_s,
                node_ip=node_ip,
                hurry=hurry,
            )
        )
