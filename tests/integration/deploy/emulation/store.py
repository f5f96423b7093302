"""The objects of an emulated cluster: their versions, changes and owners. Safe to use from several threads; a writer of
several objects at once holds `changed` meanwhile.

Stored objects are never changed in place: a reader keeps the state of the time of its read.
"""

import bisect
import copy
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from tests.integration.deploy.emulation.fields import Owners
from tests.integration.deploy.emulation.resources import PODS, SCALED, Object, RefusedError, Resource, missing

Key = tuple[Resource, str, str]
"""Resource, namespace, name."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of an object; `kind`: ADDED, MODIFIED or DELETED."""

    version: int
    kind: str
    resource: Resource
    after: Object


class Store:
    """All objects, and everything that happened to them."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.owners: dict[str, Owners] = {}
        """By uid."""
        self._objects: dict[Key, Object] = {}
        self._history: list[Change] = []
        self._versions = itertools.count(100)
        self.version = next(self._versions)

    def get(self, resource: Resource, namespace: str, name: str) -> Object:
        """RefusedError for what is not there."""
        found = self.find(resource, namespace, name)
        if found is None:
            raise missing(resource, name)
        return found

    def find(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.changed:
            return self._objects.get((resource, namespace, name))

    def all(self, resource: Resource, namespace: str = "") -> list[Object]:
        """Return all objects by name, of all namespaces where none is named."""
        with self.changed:
            found = [key for key in self._objects if key[0] == resource and namespace in ("", key[1])]
            return [self._objects[key] for key in sorted(found, key=lambda key: key[1:])]

    def owned(self, resource: Resource, owner: Object) -> list[Object]:
        """Return the objects that `owner` controls."""
        return [found for found in self.all(resource) if owner["metadata"]["uid"] in _owners(found)]

    def create(self, resource: Resource, wanted: Object, manager: str) -> Object:
        """RefusedError if there is one of that name."""
        with self.changed:
            about = wanted["metadata"]
            key = resource, str(about.get("namespace", "")), str(about["name"])
            if key in self._objects:
                raise RefusedError(409, "AlreadyExists", f'{resource.plural} "{key[2]}" already exists')
            uid = str(uuid.uuid4())
            given = {"uid": uid, "creationTimestamp": now(), "generation": 1}
            made = defaulted(resource, {**copy.deepcopy(wanted), "metadata": {**copy.deepcopy(about), **given}})
            self.owners[uid] = Owners()
            self.owners[uid].note(manager, {}, wanted)
            return self._put(key, made, "ADDED")

    def change(
        self, resource: Resource, found: Object, change: Callable[[Object], Object], manager: str = ""
    ) -> Object:
        """`change` what stands there under the name of `found`. What a `manager` changes becomes its own."""
        with self.changed:
            about = found["metadata"]
            key = resource, str(about.get("namespace", "")), str(about["name"])
            before = self.get(*key)
            after = defaulted(resource, change(copy.deepcopy(before)))
            if after == before:
                return before
            if manager:
                self.owners[before["metadata"]["uid"]].note(manager, before, after)
            if after.get("spec") != before.get("spec"):
                after["metadata"]["generation"] += 1
            return self._put(key, after, "MODIFIED")

    def delete(self, resource: Resource, found: Object, *, grace_s: int | None = None) -> Object:
        """Take it away, and then what it owns. A pod is only marked, for its kubelet to end, unless `grace_s` is 0."""
        with self.changed:
            about = found["metadata"]
            key = resource, str(about.get("namespace", "")), str(about["name"])
            here = self.get(*key)
            if resource == PODS and grace_s != 0:
                return self._mark(here, grace_s)
            gone = self._objects.pop(key)
            self.owners.pop(gone["metadata"]["uid"], None)
            self._note("DELETED", resource, copy.deepcopy(gone))
            for (kind, _, _), below in list(self._objects.items()):
                if gone["metadata"]["uid"] in _owners(below):
                    self.delete(kind, below)
            return gone

    def since(self, version: int) -> list[Change]:
        """Everything that happened after that version."""
        with self.changed:
            return self._history[bisect.bisect_right(self._history, version, key=lambda change: change.version) :]

    def _mark(self, pod: Object, grace_s: int | None) -> Object:
        grace = int(pod["spec"].get("terminationGracePeriodSeconds", 30)) if grace_s is None else grace_s
        marks = {"deletionTimestamp": now(), "deletionGracePeriodSeconds": grace}
        if "deletionTimestamp" in pod["metadata"]:
            return pod
        return self.change(PODS, pod, lambda found: {**found, "metadata": {**found["metadata"], **marks}})

    def _put(self, key: Key, found: Object, kind: str) -> Object:
        self._objects[key] = found
        self._note(kind, key[0], found)
        return found

    def _note(self, kind: str, resource: Resource, found: Object) -> None:
        self.version = next(self._versions)
        found["metadata"]["resourceVersion"] = str(self.version)
        self._history.append(Change(self.version, kind, resource, found))
        self.changed.notify_all()


def defaulted(resource: Resource, found: Object) -> Object:
    """Fill in the API's defaults for missing fields, as far as they matter here."""
    if resource in SCALED:
        found["spec"].setdefault("replicas", 1)
    return found


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def fits(found: Object, selector: Iterable[tuple[str, str, bool]]) -> bool:
    """True if labels match a parsed `selector`."""
    labels = found["metadata"].get("labels") or {}
    return all((labels.get(key) == value) is is_equal for key, value, is_equal in selector)


def parsed(selector: str) -> list[tuple[str, str, bool]]:
    """(label, value, whether it has to be so) of `a=b,c==d,e!=f`."""
    parts = [part for part in selector.split(",") if part]
    found = []
    for part in parts:
        key, sign, value = part.partition("!=") if "!=" in part else part.replace("==", "=").partition("=")
        if not sign:
            raise RefusedError(400, "BadRequest", f"a selector that this emulation does not know: {part}")
        found.append((key.strip(), value.strip(), sign == "="))
    return found


def _owners(found: Object) -> set[str]:
    return {owner["uid"] for owner in found["metadata"].get("ownerReferences", ())}
