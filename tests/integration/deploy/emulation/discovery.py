"""An API server's discovery documents: its version, its groups, their contents, and that it checks fields."""

from __future__ import annotations

from tests.integration.deploy.emulation.resources import ALL, SCALED, Object, Resource

SCHEMAS = "1.33"
"""The version of Kubernetes that this is one of."""
_VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_CHECKED = [{"name": name, "in": "query", "schema": {"type": "string"}} for name in ("fieldValidation", "dryRun")]


def discovered(path: str) -> Object | None:
    """The document at that path; None if it is none of these."""
    words = path.strip("/")
    prefixes = {each.prefix for each in ALL}
    if words == "version":
        major, minor = SCHEMAS.split(".")
        return {"major": major, "minor": minor, "gitVersion": f"v{SCHEMAS}.0"}
    if words == "api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if words == "apis":
        groups = sorted({(each.group, each.version) for each in ALL if each.group})
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*each) for each in groups]}
    if words in prefixes:
        here = [each for each in ALL if each.prefix == words]
        return _listed(here)
    if words == "openapi/v3":
        return {"paths": {prefix: {"serverRelativeURL": f"/openapi/v3/{prefix}"} for prefix in sorted(prefixes)}}
    if words.removeprefix("openapi/v3/") in prefixes:
        return _openapi([each for each in ALL if each.prefix == words.removeprefix("openapi/v3/")])
    return None


def _group(group: str, version: str) -> Object:
    found = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [found], "preferredVersion": found}


def _listed(here: list[Resource]) -> Object:
    resources = []
    for each in here:
        about = {"singularName": each.kind.lower(), "namespaced": each.is_namespaced}
        resources.append({"name": each.plural, "kind": each.kind, "verbs": _VERBS, **about})
        if each in SCALED:
            scale = {"group": "autoscaling", "version": "v1", "kind": "Scale", "verbs": ["get", "patch", "update"]}
            resources.append({"name": f"{each.plural}/scale", **about, **scale})
    version = here[0].group_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": resources}


def _openapi(here: list[Resource]) -> Object:
    """Return as much of the document as a client reads to see that it may leave the checking of fields to the
    server."""
    paths = {}
    for each in here:
        kind = {"group": each.group, "version": each.version, "kind": each.kind}
        patch = {"parameters": _CHECKED, "responses": {}, "x-kubernetes-group-version-kind": kind}
        paths[each.path("{namespace}", "{name}")] = {"patch": patch}
    return {"openapi": "3.0.0", "info": {"title": "Kubernetes", "version": SCHEMAS}, "paths": paths}
