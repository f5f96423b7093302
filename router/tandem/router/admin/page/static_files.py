"""The page's files, as they lie in `static/`: served without a key, since they contain nothing of a cluster.

The page reads its contents from the admin port, with the key that is typed into it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tandem.core.errors import NotFoundError
from tandem.router.api.http.errors import error_response
from tandem.router.error_quoting import shortened

STATIC = Path(__file__).parent / "static"
_INDEX = "index.html"
_KINDS = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing from elsewhere, nothing inline, no markup made of text, no frame around it, no form that is sent."""
HEADERS = {
    "content-security-policy": CONTENT_POLICY,
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def site_routes() -> list[Route]:
    """The page at /ui/, its files below. They are read once."""
    files = {path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in _KINDS}
    tags = {name: f'"{hashlib.sha256(body).hexdigest()[:32]}"' for name, body in files.items()}

    async def aside(request: Request) -> Response:
        # Relative, as a proxy may have the page below another path.
        return Response(status_code=307, headers={**HEADERS, "location": "ui/"})

    async def file(request: Request) -> Response:
        name = request.path_params.get("name", _INDEX)
        if name not in files:
            return error_response(NotFoundError(f"the page has no file {shortened(name)}"), headers=HEADERS)
        headers = {**HEADERS, "etag": tags[name]}
        if request.headers.get("if-none-match") == tags[name]:
            return Response(status_code=304, headers=headers)
        return Response(files[name], headers={**headers, "content-type": _KINDS[Path(name).suffix]})

    return [
        Route("/ui", aside, methods=["GET"]),
        Route("/ui/", file, methods=["GET"]),
        Route("/ui/{name}", file, methods=["GET"]),
    ]
