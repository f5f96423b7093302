"""Requests to both APIs."""

import json
from typing import Any

from tests.integration.worker.pair import MODEL
from tools.running_cluster import Cluster

PROMPT = "Return a list of the"
NOISY = {"temperature": 1.5, "seed": 11}


def ids(cluster: Cluster, text: str) -> list[int]:
    status, answer = cluster.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert status == 200
    return list(answer["tokens"])


def model_config() -> dict[str, Any]:
    return dict(json.loads((MODEL / "config.json").read_text()))
