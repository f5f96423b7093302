"""Endpoints that OpenAI's API and other servers have and this one has not: refused by name rather than as unknown
paths."""

from __future__ import annotations

from tandem.core.errors import UnsupportedEndpointError
from tandem.router.error_quoting import shortened

_ABSENT = {
    "/v1/embeddings": "embeddings",
    "/v1/moderations": "moderation",
    "/v1/audio": "audio",
    "/v1/images": "images",
    "/v1/videos": "videos",
    "/v1/realtime": "realtime sessions",
    "/v1/fine_tuning": "fine-tuning",
    "/v1/fine-tunes": "fine-tuning",
    "/v1/assistants": "assistants",
    "/v1/threads": "threads",
    "/v1/conversations": "stored conversations",
    "/v1/vector_stores": "vector stores",
    "/v1/uploads": "uploads in parts",
    "/v1/evals": "evaluations",
    "/v1/containers": "containers",
    "/v1/edits": "edits",
    "/v1/engines": "engines",
    "/v1/messages/batches": "batches of messages",
    "/v1/rerank": "reranking",
    "/v2/rerank": "reranking",
    "/rerank": "reranking",
    "/v1/score": "scores",
    "/score": "scores",
    "/pooling": "pooling",
    "/classify": "classification",
    "/generate": "generate API",
}
_TODO = "use /v1/chat/completions or /v1/completions"


def absent(path: str) -> UnsupportedEndpointError | None:
    """The refusal of a known path that is not served, with everything below it; None = this path is not known."""
    for prefix, what in _ABSENT.items():
        if path == prefix or path.startswith(f"{prefix}/"):
            why = f"this server has no {what}"
            return UnsupportedEndpointError(f"{shortened(path)} is not served", why=why, todo=_TODO)
    return None
