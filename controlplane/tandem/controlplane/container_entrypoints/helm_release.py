"""Location of a release on Kubernetes, from the flags of its controller."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.controlplane.container_entrypoints.records import check_router
from tandem.controlplane.kubernetes.adoption import Home, Homes
from tandem.controlplane.worker_settings import effective
from tandem.core.config import ClusterConfig
from tandem.core.errors import ConfigError
from tandem.core.state_enums import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseInfo:
    """The release: the API, the folder of the account that may ask it, and which pods are its workers'.

    `deployments`: prefix of the names of all pools' Deployments; `pools`: (name, role) of each pool of the chart;
    `autoscaled`: the names of those scaled from outside.
    """

    url: str
    account: Path
    namespace: str
    selector: str
    deployments: str
    pools: Sequence[tuple[str, RoleName]]
    autoscaled: Sequence[str] = ()


def check_controller(config: ClusterConfig, site: ReleaseInfo) -> Homes:
    """Return the release's pools; ConfigError for a configuration that no controller could be started with."""
    check_router(config)
    names, roles = [name for name, _ in site.pools], [role for _, role in site.pools]
    twice = next((role for role in roles if roles.count(role) > 1), None)
    if twice is not None:
        raise ConfigError(f"two pools have the role {twice}", why="the desired state has one for each role")
    unknown = next((name for name in site.autoscaled if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"there is no pool {unknown}", why=f"there are {', '.join(names)}")
    return Homes(
        [
            Home(
                pool=name,
                role=role,
                deployment=f"{site.deployments}-{name}",
                ranks=effective(config, role).tp,
                is_scaled_here=name not in site.autoscaled,
            )
            for name, role in site.pools
        ]
    )
