"""Helm's output of the chart is accepted by Kubernetes, and the references between its parts are true."""

import base64
import functools
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema_rs
import kubernetes_validate
import pytest
from kubernetes_validate import utils

from tandem.controlplane.ray.messages import HARDWARE_LABEL
from tests.integration.deploy.mounting import secrets_of
from tests.integration.deploy.rendering import CHART, GOOD, NAMESPACE, Helm, Object, Release

VERSIONS = ("1.30", "1.33", "1.37")
"""The oldest that the chart takes, the newest with schemas here, and one between."""
WITHOUT_SCHEMA = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
"""Of other projects, with definitions that are not here: nothing checks these against a schema."""
RAY_SCHEMA = json.loads((Path(__file__).parent / "schemas" / "raycluster.json").read_text())


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schemas of Kubernetes are megabytes; each is read once."""
    monkeypatch.setattr(utils, "schema_contents", _contents)


_contents = functools.cache(utils.schema_contents)


def selects(selector: Object, pod_labels: Object) -> bool:
    return bool(selector["matchLabels"].items() <= pod_labels.items())


def labels_of(workload: Object) -> Object:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def test_there_are_a_dozen_value_files() -> None:
    assert len(GOOD) >= 12


def test_helm_finds_nothing_wrong(release: Release) -> None:
    assert release.lint == []


@pytest.mark.drawn(20)
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_takes_every_object(release: Release, version: str) -> None:
    for found in release.objects:
        if found["kind"] not in WITHOUT_SCHEMA | {"RayCluster"}:
            kubernetes_validate.validate(found, version, strict=True)
    for group in release.workloads():
        pod = {"apiVersion": "v1", "kind": "Pod", **group["spec"]["template"]}
        kubernetes_validate.validate(pod, version, strict=True)


def closed(schema: Any) -> Any:
    """The same, and an object that names keys refuses others."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    others = {"additionalProperties": False} if "properties" in schema and "type" in schema else {}
    return {**{name: closed(part) for name, part in schema.items()}, **others}


def test_kuberay_takes_its_cluster(helm: Helm) -> None:
    takes = jsonschema_rs.validator_for(closed(RAY_SCHEMA))
    for name in ("ray", "ray-gpu", "ray-scaled"):
        [cluster] = helm.render((CHART / "ci" / f"{name}.yaml").read_text()).of("RayCluster")
        takes.validate(cluster)
        cluster["spec"]["workerGroupSpecs"][0]["replicaz"] = 3
        with pytest.raises(jsonschema_rs.ValidationError, match="replicaz"):
            takes.validate(cluster)


def test_a_node_of_ray_has_room_for_one_worker(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "ray-gpu.yaml").read_text())
    [cluster] = release.of("RayCluster")
    prefill, decode = sorted(cluster["spec"]["workerGroupSpecs"], key=lambda group: str(group["groupName"]))[::-1]
    config = tomllib.loads(release.config()["up.toml"])
    for group, role in ((prefill, "prefill"), (decode, "decode")):
        ranks = config[role]["tp"]
        params = group["rayStartParams"]
        assert params["num-cpus"] == str(ranks * config[role]["threads"])
        assert params["num-gpus"] == str(ranks)
        assert group["replicas"] == config["pools"][role]
        assert group["labels"] == {HARDWARE_LABEL: config[role]["hardware"]}
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no worker beside the router"
    assert config["launcher"] == "ray"


def test_up_is_told_which_raycluster_it_resizes_and_which_group_is_whose(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "ray-scaled.yaml").read_text())
    [cluster] = release.of("RayCluster")
    section = tomllib.loads(release.config()["up.toml"])["ray"]["raycluster"]
    assert (section["name"], section["namespace"]) == (cluster["metadata"]["name"], NAMESPACE)
    assert (section["prefill"], section["decode"]) == ("long", "short")
    [up] = [each for each in release.containers() if each.name == "up"]
    assert section["account"] in {mount["mountPath"] for mount in up.spec["volumeMounts"]}
    bounds = {
        group["groupName"]: (group["minReplicas"], group["replicas"], group["maxReplicas"])
        for group in cluster["spec"]["workerGroupSpecs"]
    }
    assert bounds == {"long": (0, 2, 8), "short": (0, 3, 8)}
    assert "raycluster" not in helm.render((CHART / "ci" / "ray.yaml").read_text()).config()["up.toml"]


def test_a_wrong_object_is_found(helm: Helm) -> None:
    """The check above is one."""
    found = helm.render(GOOD[0].read_text()).of("Deployment")[0]
    found["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGracePeriod"):
        kubernetes_validate.validate(found, VERSIONS[0], strict=True)


def test_names_are_unique_and_everything_says_where_it_belongs(release: Release) -> None:
    names = [(found["kind"], found["metadata"]["name"]) for found in release.objects]
    assert len(set(names)) == len(names)
    for found in release.objects:
        assert found["metadata"]["namespace"] == NAMESPACE
        assert found["metadata"]["labels"].items() >= {
            "app.kubernetes.io/instance": "demo", "app.kubernetes.io/managed-by": "Helm",
        }.items()  # fmt: skip
        assert len(found["metadata"]["name"]) <= 63


def test_every_selector_finds_the_pods_of_one_workload(release: Release) -> None:
    for found in release.workloads():
        others = [other for other in release.workloads() if selects(found["spec"]["selector"], labels_of(other))]
        assert others == [found]
        assert "tandem/role" not in found["spec"]["selector"]["matchLabels"], "a role changes while a pod runs"
    for found in release.of("Service"):
        named = {port["targetPort"] for port in found["spec"]["ports"]}
        [workload] = [w for w in release.workloads() if found["spec"]["selector"].items() <= labels_of(w).items()]
        ports = {
            port["name"]
            for each in workload["spec"]["template"]["spec"]["containers"]
            for port in each.get("ports", ())
        }
        assert named <= ports
    for found in release.of("PodDisruptionBudget"):
        assert [w for w in release.workloads() if selects(found["spec"]["selector"], labels_of(w))]


def test_autoscalers_name_what_there_is_and_alone_own_its_replicas(release: Release) -> None:
    owned = {found["spec"]["scaleTargetRef"]["name"] for kind in ("HorizontalPodAutoscaler", "ScaledObject")
             for found in release.of(kind)}  # fmt: skip
    for found in release.of("Deployment"):
        name = found["metadata"]["name"]
        assert ("replicas" in found["spec"]) is (name not in owned)
        owned.discard(name)
    assert not owned


def test_everything_that_is_mounted_is_there_and_nothing_else(release: Release) -> None:
    maps = {found["metadata"]["name"]: set(found["data"]) for found in release.of("ConfigMap")}
    for owner in release.workloads():
        pod = owner["spec"]["template"]["spec"]
        mounted = {mount["name"] for each in pod["containers"] for mount in each["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        claimed = {claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", ())}
        assert mounted == set(volumes) | claimed, owner["metadata"]["name"]
        for volume in volumes.values():
            if "configMap" in volume:
                keys = {item["key"] for item in volume["configMap"].get("items", ())}
                assert keys <= maps[volume["configMap"]["name"]]


NAMED = {
    "": {"admin-key", "cluster-secret", "redis-password"},
    "auth: {disabled: true}": {"cluster-secret", "redis-password"},
    "auth: {existingSecret: mine}": {"cluster-secret", "redis-password"},
    "redis: {mode: external, auth: {existingSecret: mine}, external: {host: a}}": {"admin-key", "cluster-secret"},
    "clusterSecret: {existingSecret: mine}\nredis: {auth: {disabled: true}}": {"admin-key"},
    (CHART / "ci" / "minimal.yaml").read_text(): set(),
}


@pytest.mark.parametrize(("values", "made"), NAMED.items())
def test_secrets_that_are_not_named_are_made_and_mounted(helm: Helm, values: str, made: set[str]) -> None:
    release = helm.render(values or "{}")
    found = {(each["metadata"]["name"], key) for each in release.of("Secret") for key in each["data"]}
    assert found == {("demo-tandem-secrets", key) for key in made}
    mounted = set().union(*(secrets_of(each) for each in release.containers()))
    assert {one for one in mounted if one[0] == "demo-tandem-secrets"} == found
    texts = [base64.b64decode(text) for each in release.of("Secret") for text in each["data"].values()]
    assert all(len(text) >= 32 for text in texts)
    assert len(set(texts)) == len(texts)
    assert ("demo-tandem-secrets was made here" in release.notes) == bool(made)


def test_accounts_are_there(release: Release) -> None:
    accounts = {found["metadata"]["name"] for found in release.of("ServiceAccount")}
    assert {each.pod["serviceAccountName"] for each in release.containers()} == accounts


def test_a_change_of_scale_replaces_no_pod(helm: Helm) -> None:
    values = (CHART / "ci" / "sim.yaml").read_text()
    more = values.replace("replicas: 2", "replicas: 5")
    assert more != values
    before, after = helm.render(values), helm.render(more)
    assert [w["spec"]["template"] for w in before.workloads()] == [w["spec"]["template"] for w in after.workloads()]


def test_what_decides_about_kv_makes_another_revision_of_all_workers(helm: Helm) -> None:
    values = (CHART / "ci" / "sim.yaml").read_text()

    def revisions(text: str) -> set[str]:
        found = [labels_of(each) for each in helm.render(text).of("Deployment")]
        return {each["tandem/revision"] for each in found if "tandem/revision" in each}

    first = revisions(values)
    assert len(first) == 1
    assert revisions(values.replace("engine: sim", "engine: sim\n    block_tokens: 32")) != first
    assert revisions(values.replace("67108864", "33554432")) != first
    assert revisions(values + "image: {worker: {tag: other}}\n") != first
    assert revisions(values + "router: {replicas: 5}\n") == first
    assert revisions(values + "revision: mine\n") == {"mine"}


def test_notes_name_the_next_three_commands_and_what_is_off(release: Release) -> None:
    assert re.findall(r"^(\d)\. ", release.notes, flags=re.MULTILINE) == ["1", "2", "3"]
    assert ("component=head" if release.of("RayCluster") else f"{release.prefix}-router") in release.notes
    assert "never run on a real cluster" in release.notes


def test_what_is_off_is_said_aloud(helm: Helm) -> None:
    shouted = helm.render((CHART / "ci" / "open.yaml").read_text()).notes
    quiet = helm.render((CHART / "ci" / "minimal.yaml").read_text()).notes
    for line in ("AUTHENTICATION IS OFF", "REDIS TAKES NO PASSWORD", "no NetworkPolicy", "as long as its pod"):
        assert line in shouted
        assert line not in quiet


def test_gpus_are_one_a_rank(helm: Helm) -> None:
    release = helm.render((CHART / "ci" / "two-classes.yaml").read_text())
    found: dict[str, Any] = {
        each.owner["metadata"]["labels"]["tandem/pool"]: each.spec["resources"]
        for each in release.containers() if each.name == "worker"
    }  # fmt: skip
    counts = {pool: resources["limits"]["nvidia.com/gpu"] for pool, resources in found.items()}
    assert counts == {"prefill": 1, "decode": 2, "decode-small": 1}
    assert all(r["limits"]["nvidia.com/gpu"] == r["requests"]["nvidia.com/gpu"] for r in found.values())
