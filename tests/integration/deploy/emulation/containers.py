"""A pod's container as a process of this machine. All that is different here from a container of an image stands in
this module:

- `python` is the interpreter of the tests, `redis-server` and `redis-cli` are this machine's; the image's user, its
  read-only root, its limits and its `/dev/shm` are not there.
- What is mounted lies below the pod's folder: paths of mounts are moved there in commands, variables and files.
- A pod has an address of its own on the loopback, in place of a network of its own. So a server that listens on
  all addresses listens there, Redis' own client asks there, and the admin port, which is on the loopback of the
  pod, is any free one.
- A Service's name is the address that it has here, and `kubernetes.default.svc` the emulated API's.
"""

import base64
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.statestore.embedded_redis import find_server
from tests.integration.deploy.emulation import access
from tests.integration.deploy.emulation.resources import CONFIG_MAPS, SECRETS, Object
from tests.integration.deploy.emulation.store import Store

_OF_THE_POD = (
    (r'\bhost = "0\.0\.0\.0"', 'host = "{ip}"'),
    (r"\badmin_port = \d+", "admin_port = 0"),
    (r"\bbind \* -::\*", "bind {ip}"),
    (r"\bredis-cli -p", "redis-cli -h {ip} -p"),
)


@dataclass(frozen=True)
class Machine:
    """Where pods run. `addresses`: of Services, by name as `name.namespace.svc`; `api`: URL of the API server."""

    folder: Path
    store: Store
    addresses: Mapping[str, str]
    api: str

    @property
    def programs(self) -> Path:
        """A folder with what an image of Redis has."""
        return self.folder / "bin"

    def prepare(self) -> None:
        """Before the first pod."""
        self.programs.mkdir(parents=True)
        server = find_server()
        (self.programs / "redis-server").symlink_to(server)
        (self.programs / "redis-cli").symlink_to(server.with_name(server.name.replace("server", "cli")))


class Container:
    """The only container of a pod, whose volumes are made with it. `ip` is the pod's."""

    def __init__(self, machine: Machine, pod: Object, ip: str, folder: Path) -> None:
        self._machine, self._pod, self.ip, self.folder = machine, pod, ip, folder
        [self.spec] = pod["spec"]["containers"]
        self._mounts = {mount["mountPath"]: mount["name"] for mount in self.spec.get("volumeMounts", ())}
        paths = "|".join(re.escape(path) for path in sorted(self._mounts, key=len, reverse=True))
        self._path = re.compile(rf"(?<![\w.])(?:{paths})(?=$|[/\s'\"])") if paths else re.compile(r"(?!)")
        self._variables = dict(self._environment())
        folder.mkdir(parents=True)
        for volume in pod["spec"].get("volumes", ()):
            self._fill(volume)
        for path, name in self._mounts.items():
            here = Path(f"{folder}{path}")
            here.parent.mkdir(parents=True, exist_ok=True)
            here.symlink_to(self._volume(name))

    @property
    def command(self) -> list[str]:
        return self.words([*self.spec["command"], *self.spec.get("args", ())])

    def words(self, command: list[str]) -> list[str]:
        """A command of the container as it is here: also those of its probes and hooks."""
        expanded = [
            re.sub(r"\$\((\w+)\)", lambda found: self._variables.get(found[1], found[0]), word) for word in command
        ]
        program, *rest = expanded
        return [sys.executable if program == "python" else program, *map(self._here, rest)]

    @property
    def variables(self) -> dict[str, str]:
        """Its environment: a path to programs, and what it is given."""
        path = f"{self._machine.programs}:{os.environ['PATH']}"
        given = {name: self._here(value) for name, value in self._variables.items()}
        return {**os.environ, "PATH": path, **given}

    def port(self, told: int | str) -> int:
        """Return the port of a probe or a Service: a number, or the name of one of its ports."""
        if isinstance(told, int):
            return told
        return int(next(port["containerPort"] for port in self.spec["ports"] if port["name"] == told))

    def path(self, inside: str) -> Path:
        """Return the place of a file of the container."""
        return Path(f"{self.folder}{inside}")

    def log(self) -> str:
        """Return the last of its output."""
        return (self.folder / "log").read_text(errors="replace")[-3000:]

    # ---- below -----------------------------------------------------------------------------------------------------

    def _here(self, text: str) -> str:
        text = self._path.sub(lambda found: f"{self.folder}{found[0]}", text)
        text = text.replace("https://kubernetes.default.svc", self._machine.api)
        for name, address in self._machine.addresses.items():
            text = text.replace(name, address)
        return text

    def _environment(self) -> Mapping[str, str]:
        about = {"metadata.name": self._pod["metadata"]["name"], "status.podIP": self.ip}
        about["metadata.namespace"] = self._pod["metadata"]["namespace"]
        found = {}
        for each in self.spec.get("env", ()):
            source = each.get("valueFrom", {})
            if "fieldRef" in source:
                found[each["name"]] = about[source["fieldRef"]["fieldPath"]]
            elif "resourceFieldRef" in source:
                kind, _, name = source["resourceFieldRef"]["resource"].partition(".")
                found[each["name"]] = str(_whole(self.spec["resources"][kind][name]))
            else:
                found[each["name"]] = each.get("value", "")
        return found

    def _volume(self, name: str) -> Path:
        claim = next(
            (each["persistentVolumeClaim"]["claimName"] for each in self._pod["spec"]["volumes"]
             if each["name"] == name and "persistentVolumeClaim" in each), ""
        )  # fmt: skip
        return self._machine.folder / "claims" / claim if claim else self.folder / "volumes" / name

    def _fill(self, volume: Object) -> None:
        """A claim stays when the pod goes; all other volumes are made anew."""
        place = self._volume(volume["name"])
        place.mkdir(parents=True, exist_ok=True)
        for source in volume.get("projected", {}).get("sources", [volume]):
            for name, content in self._contents(source).items():
                (place / name).write_bytes(content)

    def _contents(self, source: Object) -> dict[str, bytes]:
        if "serviceAccountToken" in source:
            token = access.token_of(self._pod["metadata"]["namespace"], self._pod["spec"]["serviceAccountName"])
            return {source["serviceAccountToken"]["path"]: token.encode()}
        if "configMap" in source:
            texts = self._data(CONFIG_MAPS, source["configMap"]["name"])
            found = {name: self._told(text).encode() for name, text in texts.items()}
            return _chosen(found, source["configMap"])
        if "secret" in source:
            about = source["secret"]
            data = self._data(SECRETS, about.get("name") or about["secretName"])
            return _chosen({name: base64.b64decode(text) for name, text in data.items()}, about)
        assert "emptyDir" in source or "persistentVolumeClaim" in source, source
        return {}

    def _data(self, resource: Any, name: str) -> dict[str, str]:
        """RefusedError while it is not there: the pod waits for it."""
        return dict(self._machine.store.get(resource, self._pod["metadata"]["namespace"], name)["data"])

    def _told(self, text: str) -> str:
        text = self._here(text)
        for pattern, here in _OF_THE_POD:
            text = re.sub(pattern, here.format(ip=self.ip), text)
        return text


def _chosen(found: dict[str, bytes], about: Object) -> dict[str, bytes]:
    if "items" not in about:
        return found
    return {item["path"]: found[item["key"]] for item in about["items"]}


def _whole(quantity: int | str) -> int:
    """Cores of a quantity, rounded up as Kubernetes does."""
    text = str(quantity)
    return -(-int(text[:-1]) // 1000) if text.endswith("m") else int(text)
