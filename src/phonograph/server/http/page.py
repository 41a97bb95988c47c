"""The page at /: static files of the package. They show the data of /v1/graphs."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

FOLDER = Path(__file__).parent / "static"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    # Allow the files of this server only, and no inline scripts.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter(include_in_schema=False)


FILES = {"/": "index.html"} | {
    f"/page/{path.name}": path.name for path in sorted(FOLDER.iterdir()) if path.suffix != ".html"
}
PATHS = frozenset(FILES)


def _add(url: str, path: Path) -> None:
    # Ollama's command line looks for a server with HEAD /.
    @router.api_route(url, methods=["GET", "HEAD"])
    async def page() -> Response:  # pyright: ignore[reportUnusedFunction]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix], headers=HEADERS)


for _url, _name in FILES.items():
    _add(_url, FOLDER / _name)
