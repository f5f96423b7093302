"""Helm's own code installs, upgrades, rolls back and uninstalls the chart, against an emulated API server: the objects
are then as the chart defines, and nothing is left in the end.
"""

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.deploy.emulation import access
from tests.integration.deploy.emulation.fields import leaves
from tests.integration.deploy.emulation.resources import ALL, DEPLOYMENTS, RAYCLUSTERS, SECRETS
from tests.integration.deploy.emulation.server import CERTIFICATE
from tests.integration.deploy.emulation.world import World, serving
from tests.integration.deploy.rendering import CHART, NAMESPACE, Helm, HelmError, Release

VALUES = (CHART / "ci" / "controller.yaml").read_text()
MADE = "demo-tandem-secrets"
DECODE = "demo-tandem-worker-decode"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with serving(tmp_path) as found:
        yield found


def objects(world: World) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects that exist because of the release."""
    return {
        (resource.kind, found["metadata"]["name"]): found
        for resource in ALL
        for found in world.store.all(resource)
        if found["metadata"].get("labels", {}).get("app.kubernetes.io/managed-by") == "Helm"
    }


def assert_is_as_rendered(world: World, release: Release) -> None:
    """Every object of it is there with each of its fields, and no other one."""
    found = objects(world)
    assert found.keys() == {(each["kind"], each["metadata"]["name"]) for each in release.objects}
    for wanted in release.objects:
        there = dict(leaves(found[wanted["kind"], wanted["metadata"]["name"]]))
        assert {path: there.get(path) for path, _ in leaves(wanted)} == dict(leaves(wanted))


def test_default_values_alone_are_installed(world: World, helm: Helm) -> None:
    """Keys are drawn at every rendering, so that objects are compared by kind and name."""
    assert world.act("install", values="")["status"] == "deployed"
    rendered = {(each["kind"], each["metadata"]["name"]) for each in helm.render("").objects}
    assert objects(world).keys() == rendered
    assert {"Deployment", "Service", "Secret"} <= {kind for kind, _ in rendered}


def test_a_release_is_installed_upgraded_rolled_back_and_uninstalled(world: World, helm: Helm) -> None:
    first = helm.render(VALUES)
    said = world.act("install", values=VALUES)
    assert (said["status"], said["revision"]) == ("deployed", 1)
    assert_is_as_rendered(world, first)

    changed = VALUES.replace("price: {prefill: 2.5", "log_level: DEBUG\n  price: {prefill: 2.5")
    changed += "networkPolicy: {enabled: false}\nrouter: {replicas: 3}\n"
    second = helm.render(changed)
    assert {each["kind"] for each in first.objects} - {each["kind"] for each in second.objects} == {"NetworkPolicy"}
    assert world.act("upgrade", values=changed)["revision"] == 2
    assert_is_as_rendered(world, second)

    world.act("rollback")
    assert_is_as_rendered(world, first)
    assert world.history() == [(1, "superseded"), (2, "superseded"), (3, "deployed")]
    assert len(world.release_secrets()) == 3

    world.act("uninstall")
    assert objects(world) == {}
    assert [each["metadata"]["name"] for each in world.store.all(SECRETS)] == ["tandem-keys"], "it was there before"


def test_a_release_without_values_makes_its_secrets_and_upgrades_keep_them(world: World) -> None:
    assert world.act("install", values="{}")["status"] == "deployed"
    first = world.store.get(SECRETS, NAMESPACE, MADE)["data"]
    assert set(first) == {"admin-key", "cluster-secret", "redis-password"}
    world.act("upgrade", values="router: {replicas: 3}")
    assert world.store.get(SECRETS, NAMESPACE, MADE)["data"] == first
    world.act("upgrade", values="clusterSecret: {existingSecret: tandem-keys}")
    kept = {key: text for key, text in first.items() if key != "cluster-secret"}
    assert world.store.get(SECRETS, NAMESPACE, MADE)["data"] == kept
    world.act("upgrade", values=(CHART / "ci" / "minimal.yaml").read_text())
    assert MADE not in {each["metadata"]["name"] for each in world.store.all(SECRETS)}, "none was needed"
    world.act("uninstall")
    world.act("install", values="{}")
    assert not set(world.store.get(SECRETS, NAMESPACE, MADE)["data"].values()) & set(first.values())


def test_what_another_one_owns_is_not_taken_over(world: World) -> None:
    about = {"name": DECODE, "namespace": NAMESPACE}
    world.store.create(DEPLOYMENTS, {"metadata": about, "spec": {"template": {}}}, "kubectl")
    with pytest.raises(HelmError, match="cannot be imported into the current release"):
        world.act("install", values=VALUES)
    assert objects(world) == {}


def test_values_that_are_refused_send_nothing(world: World) -> None:
    with pytest.raises(HelmError, match="replicaz"):
        world.act("install", values=VALUES + "router: {replicaz: 3}\n")
    assert objects(world) == {}
    assert world.release_secrets() == []


def test_what_the_api_refuses_is_told_and_can_be_tried_again(world: World) -> None:
    world.api.is_away = True
    with pytest.raises(HelmError, match="currently unable to handle the request"):
        world.act("install", values=VALUES)
    world.api.is_away = False
    assert world.act("install", values=VALUES)["status"] == "deployed"


def test_an_upgrade_keeps_the_scale_that_the_controller_has_set(world: World) -> None:
    world.act("install", values=VALUES)
    scale_to(world, 6)
    world.act("upgrade", values=VALUES.replace("replicas: 4", "replicas: 2"))
    assert replicas(world) == 6
    scale_to(world, 5)
    world.act("upgrade", values=VALUES)
    assert replicas(world) == 5


def test_a_rollback_does_not_undo_a_scale_unasked(world: World) -> None:
    """It writes the values of that time; fields with other owners since then are theirs, and Helm reports so."""
    world.act("install", values=VALUES)
    world.act("upgrade", values=VALUES + "networkPolicy: {enabled: false}\n")
    scale_to(world, 6)
    with pytest.raises(HelmError, match=r'conflict with "tandem-controller": \.spec\.replicas'):
        world.act("rollback")
    assert replicas(world) == 6
    assert world.act("upgrade", values=VALUES)["status"] == "deployed"
    assert replicas(world) == 6


def test_an_upgrade_keeps_the_nodes_that_up_has_asked_for_and_those_that_it_has_named(world: World) -> None:
    """Kubernetes takes all groups as one field, so what else changes in them has to be forced; the numbers stay."""
    values = (CHART / "ci" / "ray-scaled.yaml").read_text()
    world.act("install", values=values)
    name, strategy = "demo-tandem-ray", {"workersToDelete": ["demo-tandem-ray-short-1"]}

    def resized(live: dict[str, Any]) -> dict[str, Any]:
        long, short = live["spec"]["workerGroupSpecs"]
        assert (long["replicas"], short["replicas"]) == (2, 3)
        groups = [{**long, "replicas": 4}, {**short, "replicas": 2, "scaleStrategy": strategy}]
        return {**live, "spec": {**live["spec"], "workerGroupSpecs": groups}}

    found = world.store.get(RAYCLUSTERS, NAMESPACE, name)
    world.store.change(RAYCLUSTERS, found, resized, "tandem-controller")
    world.act("upgrade", values=values)
    more = values.replace("maxReplicas: 8", "maxReplicas: 9")
    with pytest.raises(HelmError, match=r'conflict with "tandem-controller": \.spec\.workerGroupSpecs'):
        world.act("upgrade", values=more)
    world.store.owners[found["metadata"]["uid"]].fields["tandem-controller"].clear()  # as --force-conflicts has it
    world.act("upgrade", values=more)
    long, short = world.store.get(RAYCLUSTERS, NAMESPACE, name)["spec"]["workerGroupSpecs"]
    assert (long["replicas"], short["replicas"], short["scaleStrategy"]) == (4, 2, strategy)
    assert long["maxReplicas"] == 9


def test_ups_account_may_resize_its_raycluster_and_nothing_else(world: World) -> None:
    world.act("install", values=(CHART / "ci" / "ray-scaled.yaml").read_text())
    head, pods = "demo-tandem-head", f"/api/v1/namespaces/{NAMESPACE}/pods"
    rayclusters = f"/apis/ray.io/v1/namespaces/{NAMESPACE}/rayclusters"
    assert asked(world, "GET", pods, account=head) == 200
    assert asked(world, "GET", f"{rayclusters}/demo-tandem-ray", account=head) == 200
    assert asked(world, "PATCH", f"{rayclusters}/demo-tandem-ray", {"metadata": {}}, account=head) == 200
    assert asked(world, "GET", f"{rayclusters}/other", account=head) == 403
    assert asked(world, "DELETE", f"{rayclusters}/demo-tandem-ray", account=head) == 403
    assert asked(world, "PATCH", f"{pods}/some", {"metadata": {}}, account=head) == 403
    assert asked(world, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets", account=head) == 403
    assert asked(world, "GET", pods, account="demo-tandem-worker") == 403


def test_the_controllers_account_may_do_what_it_needs_and_nothing_else(world: World) -> None:
    world.act("install", values=VALUES)
    pods, deployments = f"/api/v1/namespaces/{NAMESPACE}/pods", f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments"
    scale = {"spec": {"replicas": 3}}
    assert asked(world, "GET", pods) == 200
    assert asked(world, "GET", f"{deployments}/{DECODE}/scale") == 200
    assert asked(world, "PATCH", f"{deployments}/{DECODE}/scale", scale) == 200
    assert replicas(world) == 3
    assert asked(world, "PATCH", f"{deployments}/demo-tandem-router/scale", scale) == 403
    assert asked(world, "PATCH", f"{deployments}/{DECODE}", scale) == 403
    assert asked(world, "DELETE", f"{pods}/some") == 403
    assert asked(world, "GET", f"/api/v1/namespaces/{NAMESPACE}/secrets") == 403
    assert asked(world, "GET", "/api/v1/namespaces/default/pods") == 403
    assert asked(world, "GET", pods, account="demo-tandem-router") == 403
    assert asked(world, "GET", pods, account="") == 401


def asked(
    world: World, method: str, path: str, body: dict[str, Any] | None = None, *, account: str = "demo-tandem-controller"
) -> int:
    """Return the status of the answer to that account's token; "" = to no account's."""
    token = {"Authorization": f"Bearer {access.token_of(NAMESPACE, account)}"} if account else {}
    content = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/merge-patch+json", **token}
    request = urllib.request.Request(f"{world.api.url}{path}", content, headers, method=method)
    trust = ssl.create_default_context(cafile=CERTIFICATE)
    try:
        with urllib.request.urlopen(request, context=trust, timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def replicas(world: World) -> int:
    return int(world.store.get(DEPLOYMENTS, NAMESPACE, DECODE)["spec"]["replicas"])


def scale_to(world: World, count: int) -> None:
    """Scale as the controller does."""
    found = world.store.get(DEPLOYMENTS, NAMESPACE, DECODE)
    world.store.change(
        DEPLOYMENTS, found, lambda live: {**live, "spec": {**live["spec"], "replicas": count}}, "tandem-controller"
    )
