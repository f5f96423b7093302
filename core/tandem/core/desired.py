"""The desired state of a cluster: a versioned list of pools, the one thing that controllers reconcile towards."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.core.errors import ConfigError
from tandem.core.lifecycle import RoleName


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers that are alike: `count` workers of `tp` ranks with one model and role on one hardware class."""

    name: str
    model: str
    role: RoleName
    count: int
    revision: str = ""
    tp: int = 1
    hardware: str = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState:
    """All pools; `version` rises by one with every change; `is_stopped` asks the controller to end the cluster."""

    version: int
    pools: tuple[Pool, ...]
    is_stopped: bool = False

    def validate(self) -> None:
        """Raise ConfigError when no request could ever be served."""
        if any(p.count < 0 for p in self.pools):
            raise ConfigError("a pool has a negative count", todo="use 0 or more workers")
        models = tuple(dict.fromkeys(p.model for p in self.pools)) or ("",)
        for model in models:
            self._validate_model(model, f" of {model}" if len(models) > 1 else "")

    def _validate_model(self, model: str, of: str) -> None:
        counts = {role: sum(p.count for p in self.pools if p.role == role and p.model == model) for role in RoleName}
        if counts[RoleName.MIXED] == 0 and not (counts[RoleName.PREFILL] and counts[RoleName.DECODE]):
            raise ConfigError(
                f"{counts[RoleName.PREFILL]} prefill and {counts[RoleName.DECODE]} decode workers{of} cannot serve",
                why="a request needs one prefill and one decode worker, or one mixed worker",
                todo="start at least --prefill 1 --decode 1, or --mixed 1",
            )
