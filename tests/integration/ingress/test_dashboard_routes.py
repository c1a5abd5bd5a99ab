"""The page over HTTP: open to everybody, held to itself by its headers, there whatever else is away."""

from __future__ import annotations

from importlib import resources

from ingress_rig import Serve, Served

from kvfleet.ingress.auth.api_keys import hash_key
from kvfleet.ingress.dashboard.page import HEADERS, INDEX, TYPES, read_files, suffix

KEYS = f'[[keys]]\nname = "root"\nsha256 = "{hash_key("root")}"\nadmin = true\n'
FILES = read_files(resources.files("kvfleet.ingress.dashboard"))
PATHS = {"/" if name == INDEX else f"/dashboard/{name}": name for name in FILES}


async def test_the_page_needs_no_key_and_has_its_headers(serving: Serve) -> None:
    http = (await serving(keys=KEYS)).http
    for path, file in PATHS.items():
        answer = await http.get(path)
        assert (answer.status_code, answer.content) == (200, FILES[file]), path
        assert answer.headers["content-type"] == TYPES[suffix(file)].decode()
        for name, value in HEADERS:
            assert answer.headers[name.decode()] == value.decode()
        head = await http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(answer.content))
    for path, kind in (("/", "html"), ("/dashboard/dashboard.js", "javascript"), ("/dashboard/dashboard.css", "css")):
        assert (await http.get(path)).headers["content-type"] == f"text/{kind}; charset=utf-8"
    assert (await http.get("/v1/placements")).status_code == 401, "what it shows needs one"


async def test_what_is_not_there_is_refused_as_elsewhere(served: Served) -> None:
    for method, path, status, code in (
        ("GET", "/dashboard", 404, "no_such_route"),
        ("GET", "/dashboard/", 404, "no_such_route"),
        ("GET", "/dashboard/x", 404, "no_such_route"),
        ("GET", "/dashboard/index.html", 404, "no_such_route"),
        ("GET", "/dashboard/page.py", 404, "no_such_route"),
        ("GET", "/dashboard/__init__.py", 404, "no_such_route"),
        ("GET", "/dashboard/..%2fapp.py", 404, "no_such_route"),
        ("GET", "/dashboard/.%2fdashboard.js", 404, "no_such_route"),
        ("GET", "/dashboard/Dashboard.js", 404, "no_such_route"),
        ("POST", "/", 405, "method_not_allowed"),
        ("DELETE", "/dashboard/dashboard.js", 405, "method_not_allowed"),
    ):
        answer = await served.http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), (method, path)


async def test_it_is_served_while_nats_is_away(served: Served) -> None:
    await served.client.connection.close()
    assert (await served.http.get("/readyz")).status_code == 503
    for path in PATHS:
        assert (await served.http.get(path)).status_code == 200
