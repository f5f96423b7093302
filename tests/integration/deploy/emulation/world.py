"""An emulated cluster as a whole: its API server, and the namespace that a release goes to."""

import base64
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.deploy.emulation import access
from tests.integration.deploy.emulation.resources import CONFIG_MAPS, NAMESPACES, SECRETS
from tests.integration.deploy.emulation.server import CERTIFICATE, Api
from tests.integration.deploy.emulation.store import Store
from tests.integration.deploy.rendering import NAME, NAMESPACE, Helm
from tools.waiting import wait_for

KEYS = {name: f"{name} of thirty-two bytes!" for name in ("cluster-secret", "admin-key", "redis-password")}
WAIT: dict[str, Any] = {"wait": "watcher", "timeout": 300}
"""`--wait`, with Helm's own `--timeout 5m`: pods that replace each other start one after the other, maybe slowly."""


@dataclass
class World:
    """A cluster, and Helm in front of it."""

    store: Store
    api: Api
    helm: Helm

    def act(self, what: str, *, values: str = "", **options: Any) -> Any:
        """`helm install demo …` and the like, as an administrator; raises HelmError."""
        cluster = {"kubeconfig_content": json.dumps(_kubeconfig(self.api.url))}
        return self.helm.act(what, cluster, values=values, **options)

    def history(self) -> list[tuple[int, str]]:
        """(revision, status) of the release."""
        return [(each["revision"], each["status"]) for each in self.act("history")]

    def release_secrets(self) -> list[str]:
        """Return the Secrets in which Helm keeps its releases."""
        names = [each["metadata"]["name"] for each in self.store.all(SECRETS, NAMESPACE)]
        return [name for name in names if name.startswith(f"sh.helm.release.v1.{NAME}.")]


@contextmanager
def serving(folder: Path) -> Iterator[World]:
    """A cluster without nodes, with the namespace and the Secret that the page asks to make, while the block runs.
    `folder` keeps Helm's data of a cluster."""
    store = Store()
    api = Api(store)
    _prepare(store)
    thread = threading.Thread(target=api.run)
    thread.start()
    try:
        wait_for(lambda: api.is_started)
        helm = Helm(_home(folder))
        try:
            yield World(store, api, helm)
        finally:
            helm.close()
    finally:
        api.stop()
        thread.join(30)


def _prepare(store: Store) -> None:
    store.create(NAMESPACES, {"metadata": {"name": NAMESPACE}}, "kubectl")
    data = {name: base64.b64encode(text.encode()).decode() for name, text in KEYS.items()}
    secret = {"metadata": {"name": "tandem-keys", "namespace": NAMESPACE}, "type": "Opaque", "data": data}
    store.create(SECRETS, secret, "kubectl")
    root = {
        "metadata": {"name": "kube-root-ca.crt", "namespace": NAMESPACE},
        "data": {"ca.crt": CERTIFICATE.read_text()},
    }
    store.create(CONFIG_MAPS, root, "kube-controller-manager")


def _kubeconfig(url: str) -> dict[str, Any]:
    user = {"name": "administrator", "user": {"token": access.ADMINISTRATOR}}
    context = {"cluster": "emulated", "user": "administrator", "namespace": NAMESPACE}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "emulated", "cluster": {"server": url, "certificate-authority": str(CERTIFICATE)}}],
        "users": [user],
        "contexts": [{"name": "emulated", "context": context}],
        "current-context": "emulated",
    }


def _home(folder: Path) -> Mapping[str, str]:
    """Nothing of the machine's own clusters is used, and nothing is left there."""
    names = ("HOME", "KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")
    here = {name: str(folder / name.lower()) for name in names}
    others = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    return {**others, **here, "NO_PROXY": "127.0.0.1"}
