"""Patches of objects and the ownership of fields: merge patches, and apply by a manager.

Fields are identified by paths. Elements of lists that Kubernetes merges are identified by their key; other lists are
one field.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.integration.deploy.emulation.resources import Object, RefusedError

Path = tuple[str, ...]
_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "volumes": "name", "imagePullSecrets": "name",
    "volumeMounts": "mountPath", "topologySpreadConstraints": "topologyKey",
}  # fmt: skip
_NOBODYS = {("apiVersion",), ("kind",), ("metadata", "name"), ("metadata", "namespace")}


def merged(live: Object, patch: Mapping[str, Any]) -> Object:
    """A JSON merge patch: null takes a key away, lists are replaced whole."""
    found = copy.deepcopy(live)
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, dict):
            before = found.get(key)
            found[key] = merged(before if isinstance(before, dict) else {}, value)
        else:
            found[key] = copy.deepcopy(value)
    return found


@dataclass
class Owners:
    """Of one object: which fields each manager has set."""

    fields: dict[str, set[Path]] = field(default_factory=dict)

    def note(self, manager: str, before: Object, after: Object) -> None:
        """Record an update: its manager owns a changed field from now on, alone."""
        old, new = dict(leaves(before)), dict(leaves(after))
        changed = {path for path, value in new.items() if path not in old or old[path] != value}
        for paths in self.fields.values():
            paths -= changed | (set(old) - set(new))
        self.fields.setdefault(manager, set()).update(changed)

    def applied(self, live: Object, wanted: Object, manager: str, *, is_forced: bool) -> Object:
        """Return `live` with the fields that `manager` wants, without those that it wants no more and no other manager
        does. RefusedError where another manager owns a field and it would become another one, unless forced."""
        there, new = dict(leaves(live)), dict(leaves(wanted))
        mine = self.fields.get(manager, set())
        others = {name: paths for name, paths in self.fields.items() if name != manager}
        taken = {
            path: name for name, paths in others.items() for path in paths
            if path in new and path in there and there[path] != new[path]
        }  # fmt: skip
        if taken and not is_forced:
            told = ", ".join(f'conflict with "{name}": .{".".join(path)}' for path, name in sorted(taken.items()))
            raise RefusedError(409, "Conflict", f"Apply failed with {len(taken)} conflict(s): {told}")
        for paths in others.values():
            paths -= set(taken)
        found: Object = _joined(live, wanted)
        gone = mine - set(new) - {path for paths in others.values() for path in paths}
        kept = {path for path, _ in _leaves(found, ())} - gone
        for path in gone:
            _drop(found, _whole(path, kept))
        self.fields[manager] = set(new)
        return found


def leaves(found: Object) -> Iterator[tuple[Path, Any]]:
    """Every field with its value."""
    for path, value in _leaves(found, ()):
        if path not in _NOBODYS and path[0] != "status":
            yield path, value


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, dict) and (value or not path):
        for key, below in value.items():
            yield from _leaves(below, (*path, key))
    elif isinstance(value, list) and (key := _key(path[-1], value)):
        for each in value:
            yield from _leaves(each, (*path, f"{key}={each[key]}"))
    else:
        yield path, value


def _key(name: str, items: list[Any]) -> str:
    """Return the key that identifies elements of that list; "" = it is one field."""
    if not items or not all(isinstance(each, dict) for each in items):
        return ""
    if name == "ports":
        wanted = "containerPort" if "containerPort" in items[0] else "port" if "targetPort" in items[0] else ""
    else:
        wanted = _KEYS.get(name, "")
    return wanted if wanted and all(wanted in each for each in items) else ""


def _joined(live: Any, wanted: Any, name: str = "") -> Any:
    if isinstance(live, dict) and isinstance(wanted, dict):
        found = copy.deepcopy(live)
        for key, value in wanted.items():
            found[key] = _joined(live.get(key), value, key)
        return found
    if isinstance(live, list) and isinstance(wanted, list) and (key := _key(name, wanted)) and _key(name, live) == key:
        there, new = {each[key]: each for each in live}, {each[key]: each for each in wanted}
        added = [_joined(there.get(told), each) for told, each in new.items()]
        return [*added, *(copy.deepcopy(each) for told, each in there.items() if told not in new)]
    return copy.deepcopy(wanted)


def _whole(path: Path, kept: set[Path]) -> Path:
    """The largest part around a field that holds nothing that is kept: an element of a list is gone with its key."""
    parts = (path[: size + 1] for size in range(len(path)))
    return next((part for part in parts if not any(each[: len(part)] == part for each in kept)), path)


def _drop(found: Any, path: Path) -> None:
    for step in path[:-1]:
        found = _step(found, step)
        if found is None:
            return
    told, is_element, value = path[-1].partition("=")
    if isinstance(found, dict):
        found.pop(path[-1], None)
    elif isinstance(found, list) and is_element:
        found[:] = [each for each in found if str(each.get(told)) != value]


def _step(found: Any, step: str) -> Any:
    if isinstance(found, dict):
        return found.get(step)
    key, _, value = step.partition("=")
    return next((each for each in found if str(each.get(key)) == value), None)
