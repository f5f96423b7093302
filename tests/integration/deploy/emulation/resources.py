"""The kinds of objects that an emulated API server knows, and where each stands in its paths."""

from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]


class RefusedError(Exception):
    """The API's refusal of a request."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason, self.message = code, reason, message

    @property
    def status(self) -> Object:
        about = {"status": "Failure", "code": self.code, "reason": self.reason, "message": self.message}
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, **about}


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, all of one version. `group` "" is the core one."""

    group: str
    version: str
    plural: str
    kind: str
    is_namespaced: bool = True

    @property
    def group_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def prefix(self) -> str:
        """Of its paths, without the first slash."""
        return f"apis/{self.group_version}" if self.group else f"api/{self.version}"

    def path(self, namespace: str, name: str) -> str:
        within = f"/namespaces/{namespace}" if self.is_namespaced else ""
        return f"/{self.prefix}{within}/{self.plural}/{name}"


def missing(resource: Resource, name: str) -> RefusedError:
    dotted = f"{resource.plural}.{resource.group}" if resource.group else resource.plural
    return RefusedError(404, "NotFound", f'{dotted} "{name}" not found')


NAMESPACES = Resource("", "v1", "namespaces", "Namespace", is_namespaced=False)
PODS = Resource("", "v1", "pods", "Pod")
SERVICES = Resource("", "v1", "services", "Service")
SECRETS = Resource("", "v1", "secrets", "Secret")
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
REPLICA_SETS = Resource("apps", "v1", "replicasets", "ReplicaSet")
STATEFUL_SETS = Resource("apps", "v1", "statefulsets", "StatefulSet")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")
RAYCLUSTERS = Resource("ray.io", "v1", "rayclusters", "RayCluster")
ALL = (
    NAMESPACES, PODS, SERVICES, SECRETS, CONFIG_MAPS, SERVICE_ACCOUNTS, DEPLOYMENTS, REPLICA_SETS, STATEFUL_SETS, ROLES,
    ROLE_BINDINGS, RAYCLUSTERS,
    Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget"),
    Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy"),
    Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler"),
)  # fmt: skip
"""Definitions of others, as of KEDA and Prometheus, are not installed. Of a RayCluster nothing is checked."""
SCALED = (DEPLOYMENTS, REPLICA_SETS, STATEFUL_SETS)
BY_PATH = {(each.prefix, each.plural): each for each in ALL}
