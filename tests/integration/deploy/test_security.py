"""Restrictions of the chart's pods, and the connections that are allowed between them."""

import base64
import math
import tomllib
from typing import Any
from urllib.parse import urlsplit

import pytest

from tandem.controlplane.container_entrypoints.prestop import HAND_BACK_S
from tandem.router.server.shutdown import AFTER_DRAIN_S
from tandem.workerhost.host import SERVER_GRACE_S, STOP_TIMEOUT_S
from tandem.workerhost.membership import LEAVE_TIMEOUT_S
from tests.integration.deploy.rendering import CHART, Container, Helm, Object, Release

WRITABLE = {"run", "tmp", "cache", "shared-memory", "data", "files"}


def test_pods_are_nobody_and_share_nothing(release: Release) -> None:
    for each in release.containers():
        pod = each.pod
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"} & set(pod)
        assert pod["automountServiceAccountToken"] is False
        tokens = [volume["name"] for volume in pod["volumes"] if "serviceAccountToken" in str(volume)]
        is_resizing = each.component == "head" and bool(release.of("Role"))
        assert tokens == (["account"] if each.component == "controller" or is_resizing else [])
        mounts = [mount["name"] for mount in each.spec["volumeMounts"]]
        assert ("account" in mounts) is (bool(tokens) and each.is_ours), "Ray's own container has no token"
        assert pod["enableServiceLinks"] is False


def test_containers_can_change_nothing_and_gain_nothing(release: Release) -> None:
    for each in release.containers():
        security = each.spec["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["privileged"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        writable = {mount["name"] for mount in each.spec["volumeMounts"] if not mount.get("readOnly")}
        hub = {"models"} if any(v["name"] == "HF_HOME" for v in each.spec.get("env", ())) else set()
        assert writable <= WRITABLE | hub


def test_containers_say_what_they_need(release: Release) -> None:
    for each in release.containers():
        resources = each.spec["resources"]
        assert set(resources["requests"]) >= {"cpu", "memory"}
        assert "memory" in resources["limits"]
        for volume in each.pod["volumes"]:
            if "emptyDir" in volume:
                assert "sizeLimit" in volume["emptyDir"], volume["name"]


def test_containers_are_probed_and_no_life_depends_on_others(release: Release) -> None:
    for each in release.containers():
        if each.name == "controller":
            assert "ports" not in each.spec, "it can be asked nothing; it ends when it cannot go on"
            continue
        probes = {name: each.spec[f"{name}Probe"] for name in ("startup", "readiness", "liveness")}
        if each.name in ("router", "up"):
            paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
            assert paths == {"startup": "/livez", "readiness": "/readyz", "liveness": "/livez"}
        elif each.name == "worker":
            ports = {port["containerPort"] for port in each.spec["ports"]}
            assert all({probe["grpc"]["port"]} == ports for probe in probes.values())
        elif each.name == "redis":
            assert "tcpSocket" in probes["liveness"], "one that loads its data lives"


def test_secrets_are_only_referred_to(release: Release) -> None:
    made = {text for found in release.of("Secret") for text in found["data"].values()}
    others = str([found for found in release.objects if found["kind"] != "Secret"])
    for text in made:
        assert text not in others
        assert base64.b64decode(text).decode() not in others + release.notes
    for each in release.containers():
        assert not [v for v in each.spec.get("env", ()) if "secretKeyRef" in v.get("valueFrom", {})]
        assert not [v for v in each.spec.get("env", ()) if "password" in v.get("value", "").lower()]
    for name, text in release.config().items():
        url = urlsplit(tomllib.loads(text)["redis"]["url"])
        assert url.password is None, name


def grace_s(each: Container) -> int:
    return int(each.pod["terminationGracePeriodSeconds"])


def test_a_worker_has_time_to_drain(release: Release) -> None:
    for each in release.containers():
        if each.name == "worker":
            command = each.spec["lifecycle"]["preStop"]["exec"]["command"]
            drain_s = float(command[command.index("--deadline") + 1])
            end_s = LEAVE_TIMEOUT_S + SERVER_GRACE_S + STOP_TIMEOUT_S
            assert grace_s(each) >= drain_s + HAND_BACK_S + end_s + 5


def test_a_router_has_time_for_its_answers(helm: Helm) -> None:
    for name, drain_s in (("minimal", 10.0), ("tls", 45.5)):
        release = helm.render((CHART / "ci" / f"{name}.yaml").read_text())
        [each] = [found for found in release.containers() if found.name == "router"]
        pause_s = each.spec["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert grace_s(each) >= pause_s + math.ceil(drain_s) + AFTER_DRAIN_S


def test_pools_never_want_one_pod_more_than_there_is_room(release: Release) -> None:
    for found in release.of("Deployment"):
        if "tandem/pool" in found["metadata"]["labels"]:
            assert found["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0
            assert found["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] >= 1


# ---- networks ------------------------------------------------------------------------------------------------------


def covers(policy: Object, workload: Object) -> bool:
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return bool(policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items())


def test_every_pod_has_a_policy_for_both_directions(release: Release) -> None:
    policies = release.of("NetworkPolicy")
    if not policies:
        assert "There is no NetworkPolicy" in release.notes
        return
    for workload in release.workloads():
        [policy] = [found for found in policies if covers(found, workload)]
        assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}


def reaches(release: Release, who: str, to: str, port: int) -> bool:
    """True if policies let pods of component `who` open a connection to `port` of component `to`."""
    by_component = {
        found["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]: found["spec"]
        for found in release.of("NetworkPolicy")
    }
    out = by_component[who].get("egress", [])
    into = by_component[to].get("ingress", [])
    return any(allows(rule, "to", to, port) for rule in out) and any(allows(r, "from", who, port) for r in into)


def allows(rule: dict[str, Any], side: str, component: str, port: int) -> bool:
    ports = [each["port"] for each in rule.get("ports", ())]
    peers = [peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in rule.get(side, ())]
    return (not ports or port in ports) and (side not in rule or component in peers)


@pytest.mark.parametrize(
    ("who", "to", "port", "may"),
    [
        ("router", "worker", 7000, True), ("router", "worker", 41234, False), ("worker", "worker", 41234, True),
        ("worker", "redis", 6379, True), ("router", "redis", 6379, True), ("controller", "redis", 6379, True),
        ("controller", "worker", 7000, True), ("worker", "router", 8000, False), ("redis", "worker", 7000, False),
        ("redis", "router", 8000, False), ("router", "router", 8002, False),
    ],
)  # fmt: skip
def test_who_reaches_whom(helm: Helm, who: str, to: str, port: int, may: bool) -> None:
    release = helm.render((CHART / "ci" / "controller.yaml").read_text())
    assert reaches(release, who, to, port) is may


def test_named_clients_alone_reach_the_api(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "tls.yaml").read_text())
    [rule] = release.one("NetworkPolicy", "-router")["spec"]["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]
    assert {each["port"] for each in rule["ports"]} == {8000, 8001}, "never the admin port"


def collectors(release: Release) -> dict[str, list[Object]]:
    """Rules for what leaves, beyond pods of the release, Redis and names, by component."""
    found = {}
    for policy in release.of("NetworkPolicy"):
        component = policy["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
        rules = [rule for rule in policy["spec"].get("egress", ()) if "podSelector" not in str(rule)]
        found[component] = [rule for rule in rules if rule["ports"][0]["port"] != 53]
    return found


def test_routers_alone_reach_the_collector(helm: Helm) -> None:
    found = collectors(helm.render((CHART / "ci" / "traced.yaml").read_text()))
    there = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}]
    assert found.pop("router") == [{"ports": [{"port": 4318, "protocol": "TCP"}], "to": there}]
    assert set(found) == {"worker", "redis"}
    assert not any(found.values())


@pytest.mark.parametrize(
    ("endpoint", "more", "ports"),
    [
        ("http://collector:4318", "", [4318]), ("https://collector/otlp", "", [443]), ("http://collector", "", [80]),
        ("http://[fd00::1]:4318", "", [4318]), ("http://collector", "networkPolicy: {collector: {ports: [4317, 9]}}",
        [4317, 9]),
    ],
)  # fmt: skip
def test_the_collector_s_port_is_the_endpoint_s(helm: Helm, endpoint: str, more: str, ports: list[int]) -> None:
    values = (CHART / "ci" / "minimal.yaml").read_text()
    release = helm.render(f'{values}config: {{tracing: {{endpoint: "{endpoint}"}}}}\n{more}\n')
    [rule] = collectors(release)["router"]
    assert [each["port"] for each in rule["ports"]] == ports
    assert "to" not in rule


# ---- rights --------------------------------------------------------------------------------------------------------


def test_only_the_controller_has_rights_and_few(helm: Helm) -> None:
    assert helm.render((CHART / "ci" / "minimal.yaml").read_text()).of("Role") == []
    release = helm.render((CHART / "ci" / "autoscaled.yaml").read_text())
    [role], [binding] = release.of("Role"), release.of("RoleBinding")
    assert release.of("ClusterRole") == []
    assert [subject["name"] for subject in binding["subjects"]] == [f"{release.prefix}-controller"]
    pods, scales = role["rules"]
    assert (pods["resources"], set(pods["verbs"])) == (["pods"], {"list", "watch", "patch"})
    assert (scales["resources"], set(scales["verbs"])) == (["deployments/scale"], {"get", "patch"})
    assert scales["resourceNames"] == [f"{release.prefix}-worker-spare"], "not what an autoscaler owns"


def test_beside_rays_head_up_may_resize_its_raycluster_where_that_is_wanted(helm: Helm) -> None:
    assert helm.render((CHART / "ci" / "ray.yaml").read_text()).of("Role") == []
    release = helm.render((CHART / "ci" / "ray-scaled.yaml").read_text())
    [role], [binding], [cluster] = release.of("Role"), release.of("RoleBinding"), release.of("RayCluster")
    assert [subject["name"] for subject in binding["subjects"]] == [f"{release.prefix}-head"]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    pods, resizing = role["rules"]
    assert (pods["resources"], pods["verbs"]) == (["pods"], ["list"])
    assert (resizing["apiGroups"], resizing["resources"]) == (["ray.io"], ["rayclusters"])
    assert (resizing["resourceNames"], set(resizing["verbs"])) == ([cluster["metadata"]["name"]], {"get", "patch"})
    egress = str(release.one("NetworkPolicy", "-head")["spec"]["egress"])
    assert "6443" in egress
    assert "6443" not in str(helm.render((CHART / "ci" / "ray.yaml").read_text()).of("NetworkPolicy"))
