"""Write the chart's `values.schema.json`: settings of a cluster as `core/config.py` has them, all else as stands here.

    python -m tools.chart_schema [--check]

Every object refuses keys that it does not name. FREE lists what Kubernetes itself describes and checks.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import sys
import typing
from pathlib import Path
from typing import Any, Final

from tandem.core import config, logs
from tandem.core.bounds import Bound
from tandem.core.output_format_names import ReasoningFormatName, ToolFormatName
from tandem.engine.model_config import DTYPES, TP_SIZES
from tandem.engine.weight_formats import QUANTISATIONS
from tandem.kvtransfer.transports.registry import AUTO, TRANSPORTS

FILE: Final = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "tandem" / "values.schema.json"
Schema = dict[str, Any]

TEXT: Final[Schema] = {"type": "string"}
FLAG: Final[Schema] = {"type": "boolean"}
FREE: Final[Schema] = {"type": "object", "$comment": "as Kubernetes has it"}
COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
POSITIVE: Final[Schema] = {"type": "integer", "minimum": 1}
PORT: Final[Schema] = {"type": "integer", "minimum": 1, "maximum": 65535}
SECONDS: Final[Schema] = {"type": "integer", "minimum": 0, "maximum": 86400}
LEVELS: Final[Schema] = {"enum": ["DEBUG", "INFO", "WARNING", "ERROR"]}
NAME: Final[Schema] = {"type": "string", "maxLength": 253, "pattern": r"^([a-z0-9]([a-z0-9.-]*[a-z0-9])?)?$"}
QUANTITY: Final[Schema] = {
    "type": ["string", "integer", "number"],
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
}
OUR_LABELS: Final = r"^(tandem|app\.kubernetes\.io|helm\.sh)/"
URLS: Final[Schema] = {"type": "string", "pattern": r"^(https?://[^\s/?#@]+(/[^\s?#@]*)?)?$"}
CHOICES: Final = {
    "engine": list(config.ENGINES),
    "transport": [AUTO, *TRANSPORTS],
    "kv_dtype": ["auto", *DTYPES],
    "wire_codec": ["", "int8", "fp8"],
    "default_slo": None,
}
OF_THE_CHART: Final = {
    "worker": {"tp", "hardware", "device"},
    "router": {"host", "port", "grpc_port", "admin_port", "tls_cert", "tls_key", "anonymous"},
    "store": {"dir"},
}
"""Settings that the chart makes of other values."""


def record(properties: Schema, required: tuple[str, ...] = (), **more: Any) -> Schema:
    """An object with these keys and no others."""
    needs = {"required": list(required)} if required else {}
    return {"type": "object", "additionalProperties": False, "properties": properties, **needs, **more}


def named(values: Schema, pattern: str = "") -> Schema:
    """An object with free keys, and values of that form."""
    if not pattern:
        return {"type": "object", "additionalProperties": values}
    return {"type": "object", "additionalProperties": False, "patternProperties": {pattern: values}}


def several(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def when(condition: Schema, then: Schema) -> Schema:
    return {"if": condition, "then": then}


# ---- settings of the cluster ---------------------------------------------------------------------------------------


def of_dataclass(kind: type[Any], without: frozenset[str] | set[str] = frozenset()) -> Schema:
    """The keys of a section of `cluster.toml`, with their types and bounds."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind) if field.name not in without]
    return record({name: _chosen(name, of_type(hints[name])) for name in names})


def of_type(kind: Any) -> Schema:
    """Return the schema of a field of that type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return {**of_type(arguments[0]), **_bounded(kind.__metadata__)}
    if origin is tuple:
        return several(of_type(arguments[0]))
    if origin is dict:
        return named(of_type(arguments[1]))
    if dataclasses.is_dataclass(kind):
        return of_dataclass(typing.cast("type[Any]", kind))
    if issubclass(kind, enum.StrEnum):
        return {"enum": [member.value for member in kind]}
    return {"type": {str: "string", bool: "boolean", int: "integer", float: "number"}[kind]}


def _bounded(metadata: tuple[Any, ...]) -> Schema:
    found: Schema = {}
    for bound in metadata:
        if isinstance(bound, Bound):
            found["exclusiveMinimum" if bound.is_above else "minimum"] = bound.least
            if bound.most < sys.float_info.max:
                found["maximum"] = bound.most
    return found


def _chosen(name: str, found: Schema) -> Schema:
    if name == "transports":
        return several({"enum": list(TRANSPORTS)})
    if name == "endpoint":
        return URLS
    return {"enum": CHOICES[name]} if CHOICES.get(name) else found


def settings() -> Schema:
    """`config`: sections of `cluster.toml`."""
    sections = {
        "worker": config.WorkerSection,
        "router": config.RouterSection,
        "admission": config.AdmissionSection,
        "store": config.StoreSection,
        "planner": config.PlannerSection,
        "price": config.PriceSection,
        "tracing": config.TracingSection,
    }
    found = {name: of_dataclass(kind, OF_THE_CHART.get(name, frozenset())) for name, kind in sections.items()}
    return record(
        {
            "log_level": LEVELS,
            "log_format": {"enum": list(logs.FORMATS)},
            **found,
            "slo": named(of_dataclass(config.SloSection)),
            "budget": named(of_dataclass(config.BudgetSection)),
        }
    )


# ---- parts of Kubernetes -------------------------------------------------------------------------------------------


def resources() -> Schema:
    amounts = record(dict.fromkeys(("cpu", "memory", "ephemeral-storage"), QUANTITY))
    return record(
        {"requests": {**amounts, "required": ["cpu", "memory"]}, "limits": {**amounts, "required": ["memory"]}},
        ("requests", "limits"),
    )


def image() -> Schema:
    return record(
        {
            "repository": {"type": "string", "minLength": 1},
            "tag": TEXT,
            "digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
        },
        ("repository",),
    )


def placing() -> Schema:
    """Keys for the placement of pods, and their labels."""
    toleration = {"key": TEXT, "operator": {"enum": ["Exists", "Equal"]}, "value": TEXT, "tolerationSeconds": COUNT,
                  "effect": {"enum": ["", "NoSchedule", "PreferNoSchedule", "NoExecute"]}}  # fmt: skip
    spread = {"topologyKey": {"type": "string", "minLength": 1}, "maxSkew": POSITIVE,
              "whenUnsatisfiable": {"enum": ["ScheduleAnyway", "DoNotSchedule"]}}  # fmt: skip
    kinds = ("nodeAffinity", "podAffinity", "podAntiAffinity")
    return {
        "nodeSelector": named(TEXT),
        "tolerations": several(record(toleration)),
        "affinity": record(dict.fromkeys(kinds, FREE)),
        "topologySpread": several(record(spread, ("topologyKey", "maxSkew", "whenUnsatisfiable"))),
        "priorityClassName": NAME,
        "podAnnotations": named(TEXT),
        "podLabels": {**named(TEXT), "propertyNames": {"not": {"pattern": OUR_LABELS}}},
    }


def disruption() -> Schema:
    most = {"oneOf": [POSITIVE, {"type": "string", "pattern": "^[1-9][0-9]?%$|^100%$"}]}
    return record({"enabled": FLAG, "maxUnavailable": most})


def reference(**more: Schema) -> Schema:
    """A Secret that exists already, and a key in it."""
    return record({"existingSecret": NAME, "key": {"type": "string", "minLength": 1}, **more})


# ---- parts of the chart --------------------------------------------------------------------------------------------


def pool(defaults: bool = False) -> Schema:
    own: Schema = {
        "replicas": COUNT,
        "tp": {"enum": list(TP_SIZES)},
        "hardware": {"type": "string", "pattern": "^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"},
        "gpu": record({"enabled": FLAG, "resource": {"type": "string", "pattern": "^[a-z0-9.-]+/[A-Za-z0-9._-]+$"}}),
        "sharedMemory": QUANTITY,
        "resources": resources(),
        "drainSeconds": SECONDS,
        "startupSeconds": {**SECONDS, "minimum": 30},
        "maxUnavailable": POSITIVE,
        "runtimeClassName": NAME,
        "podDisruptionBudget": disruption(),
        "variables": named(TEXT, "^(TANDEM_NATIVE|TANDEM_KERNELS|TANDEM_CPU_LEVEL|NCCL_[A-Z0-9_]+)$"),
        **placing(),
    }
    if defaults:
        return record(own)
    scaling = record(
        {
            "kind": {"enum": ["none", "hpa", "keda"]},
            "minReplicas": POSITIVE,
            "maxReplicas": POSITIVE,
            "metrics": several(FREE),
            "triggers": several(FREE),
        },
        ("kind", "minReplicas", "maxReplicas"),
        allOf=[
            when(has(kind="hpa"), {"required": ["metrics"], "properties": {"metrics": {"minItems": 1}}}),
            when(has(kind="keda"), {"required": ["triggers"], "properties": {"triggers": {"minItems": 1}}}),
        ],
    )
    role = {"enum": ["prefill", "decode", "mixed"]}
    own |= {"settings": of_dataclass(config.WorkerSection, OF_THE_CHART["worker"]), "autoscaling": scaling}
    return record({"role": role, **own}, ("role",))


def has(**values: Any) -> Schema:
    """A schema of objects that have all of these keys, with these values."""
    return {"properties": {key: {"const": value} for key, value in values.items()}, "required": list(values)}


def router() -> Schema:
    service = record(
        {
            "type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            "port": PORT,
            "grpcPort": PORT,
            "annotations": named(TEXT),
        }
    )
    scaling = record(
        {
            "enabled": FLAG,
            "minReplicas": POSITIVE,
            "maxReplicas": POSITIVE,
            "targetCPUUtilizationPercentage": {**POSITIVE, "maximum": 1000},
        }
    )
    return record(
        {
            "replicas": COUNT,
            "service": service,
            "tls": record({"existingSecret": NAME}),
            "files": record({"existingClaim": NAME}),
            "autoscaling": scaling,
            "preStopSeconds": SECONDS,
            "resources": resources(),
            "podDisruptionBudget": disruption(),
            **placing(),
        }
    )


def kuberay() -> Schema:
    return record(
        {
            "rayVersion": {"type": "string", "pattern": r"^[0-9]+\.[0-9]+\.[0-9]+$"},
            "token": record({"existingSecret": NAME}),
            "placeTimeoutSeconds": {**POSITIVE, "maximum": 240},
            "scaling": record({"enabled": FLAG, "maxReplicas": POSITIVE}),
            "head": record({"resources": resources()}),
        }
    )


def redis() -> Schema:
    storage = record({"ephemeral": FLAG, "size": QUANTITY, "storageClassName": NAME})
    internal = record({"image": image(), "resources": resources(), "storage": storage,
                       "podDisruptionBudget": disruption(), **placing()})  # fmt: skip
    external = record(
        {
            "host": {"type": "string", "pattern": "^[A-Za-z0-9._-]*$"},
            "port": PORT,
            "database": {**COUNT, "maximum": 1023},
            "username": {"type": "string", "pattern": "^[A-Za-z0-9._~-]*$"},
            "tls": FLAG,
            "caSecret": reference(),
        }
    )
    return record(
        {
            "mode": {"enum": ["internal", "external"]},
            "auth": reference(disabled=FLAG),
            "internal": internal,
            "external": external,
        },
        allOf=[
            when(
                has(mode="external"),
                {"properties": {"external": {"properties": {"host": {"minLength": 1}}}, "auth": guarded({})}},
            )
        ],
    )


def guarded(found: Schema) -> Schema:
    """A Secret that has to be named, as the chart cannot make it, unless `disabled` states that there is none."""
    needed = {"properties": {"existingSecret": {"minLength": 1}}, "required": ["existingSecret"]}
    return {**found, "if": has(disabled=True), "then": {}, "else": needed}


def model() -> Schema:
    volume = record(
        {"kind": {"enum": ["none", "claim", "hostPath", "emptyDir"]}, "claim": NAME,
         "hostPath": {"type": "string", "pattern": "^(/.*)?$"}, "sizeLimit": QUANTITY},
        ("kind",),
        allOf=[
            when(has(kind="claim"), {"properties": {"claim": {"minLength": 1}}}),
            when(has(kind="hostPath"), {"properties": {"hostPath": {"minLength": 1}}}),
        ],
    )  # fmt: skip
    return record(
        {
            "path": TEXT,
            "revision": TEXT,
            "servedNames": several({"type": "string", "minLength": 1}),
            "dtype": {"enum": ["auto", *DTYPES]},
            "quantize": {"enum": [*QUANTISATIONS]},
            "quantizeCalibration": TEXT,
            "maxModelLen": COUNT,
            "chatTemplate": TEXT,
            "toolFormat": {"enum": [*ToolFormatName]},
            "reasoningFormat": {"enum": [*ReasoningFormatName]},
            "volume": volume,
            "hubToken": reference(),
        }
    )


def network_policy() -> Schema:
    collector = record({"peers": several(FREE), "ports": several(PORT)})
    ports = several(PORT, minItems=1)
    return record({"enabled": FLAG, "clients": several(FREE), "apiServerPorts": ports, "collector": collector})


def metrics() -> Schema:
    monitor = record({"enabled": FLAG, "interval": {"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                      "labels": named(TEXT), "token": reference()})  # fmt: skip
    return record(
        {
            "serviceMonitor": monitor,
            "prometheusRule": record({"enabled": FLAG, "labels": named(TEXT), "groups": several(FREE)}),
            "dashboards": record({"enabled": FLAG, "labels": named(TEXT), "files": named(TEXT, r"^[a-z0-9-]+\.json$")}),
        }
    )


def conditions() -> list[Schema]:
    """Fields that exclude or need others: a planner and autoscalers of pools, a planner and its runner, Ray and its
    token."""
    on_ray, on_kubernetes = has(backend="kuberay"), has(backend="kubernetes")
    is_planning = inside("config", "planner", {"properties": {"mode": {"not": {"const": "off"}}}, "required": ["mode"]})
    by_nobody_else = inside("pools", {"additionalProperties": inside("autoscaling", has(kind="none"), needs=False)})
    by_controller = inside("controller", {"properties": {"enabled": {"const": True}}})
    token = inside("kuberay", "token", {"properties": {"existingSecret": {"minLength": 1}}})
    no_controller = inside("controller", {"properties": {"enabled": {"const": False}}})
    no_scaler = inside("router", "autoscaling", {"properties": {"enabled": {"const": False}}})
    return [
        when(is_planning, by_nobody_else),
        when({"allOf": [is_planning, on_kubernetes]}, by_controller),
        when(on_ray, {"allOf": [token, by_nobody_else, no_controller, no_scaler, has(revision="")]}),
    ]


def inside(*path: Any, needs: bool = True) -> Schema:
    """The schema that is last in `path`, below the keys before it."""
    *keys, found = path
    for key in reversed(keys):
        found = {"properties": {key: found}, **({"required": [key]} if needs else {})}
    return dict(found)


def values() -> Schema:
    """The whole schema."""
    images = {
        **dict.fromkeys(("router", "worker", "ray"), image()),
        "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "pullSecrets": several({**NAME, "minLength": 1}),
    }
    found = record(
        {
            "backend": {"enum": ["kubernetes", "kuberay"]},
            "fullnameOverride": {**NAME, "maxLength": 40},
            "clusterName": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9_-]{0,39})?$"},
            "revision": {"type": "string", "pattern": "^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$"},
            "auth": reference(disabled=FLAG),
            "clusterSecret": reference(),
            "image": record(images),
            "model": model(),
            "config": settings(),
            "router": router(),
            "controller": record({"enabled": FLAG, "resources": resources(), **placing()}),
            "poolDefaults": pool(defaults=True),
            "pools": {**named(pool(), "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"), "minProperties": 1},
            "kuberay": kuberay(),
            "redis": redis(),
            "networkPolicy": network_policy(),
            "metrics": metrics(),
            "tracing": record({"headers": reference(), "caSecret": reference()}),
            "global": {"type": "object", "$comment": "what a parent chart hands down; unused"},
        },
        ("auth", "clusterSecret", "model", "config", "router", "pools", "redis"),
        allOf=conditions(),
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Values of the chart tandem", **found}


def text() -> str:
    """The file's content."""
    return json.dumps(values(), indent=1) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only, change nothing")
    if not parser.parse_args().check:
        FILE.write_text(text(), encoding="utf-8")
        return 0
    is_current = FILE.read_text(encoding="utf-8") == text()
    if not is_current:
        sys.stderr.write(f"{FILE.name} is not what the settings are; run `python -m tools.chart_schema`\n")
    return 0 if is_current else 1


if __name__ == "__main__":
    sys.exit(main())
