"""The walls between the parts, read from the source, and one look at a real process."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("prefill_svc", "decode_svc", "router")
COMPOSED = {"mixed_svc": ("prefill_svc", "decode_svc")}
"""Packages that compose services, and which."""
PACKAGES = ("baton", *SERVICES, *COMPOSED)

PURE = (
    "baton.breaker",
    "baton.completion",
    "baton.config",
    "baton.config.roles",
    "baton.engine.contract",
    "baton.engine.core",
    "baton.engine.fake",
    "baton.engine.plan",
    "baton.errors",
    "baton.kv.format",
    "baton.kv.hashing",
    "baton.kv.cached_blocks",
    "baton.kv.pool",
    "baton.kv.prefix.fetch_cost",
    "baton.kv.prefix.tiered",
    "baton.ledger",
    "baton.lifecycle",
    "baton.planner.communication",
    "baton.planner.hardware",
    "baton.planner.memory",
    "baton.planner.roofline",
    "baton.planner.shape",
    "baton.rates",
    "baton.request",
    "decode_svc.admission",
    "decode_svc.attempts",
    "decode_svc.messages",
    "decode_svc.reservation",
    "decode_svc.scheduler",
    "mixed_svc.budget",
    "prefill_svc.scheduler",
    "router.placement.prefix_directory",
    "router.placement.policy",
    "router.placement.queue",
    "router.retries",
    "router.workers.failures",
)
IMPURE = ("torch", "grpc", "asyncio", "transformers", "redis", "google.protobuf", "baton.pb")

EDGES = (
    "baton.client",
    "baton.rpc",
    "baton.transfer.tickets",
    "baton.transfer.transport",
    "baton.transfer.wire",
    "baton.worker.start",
    "baton.worker.status",
    "decode_svc.app",
    "decode_svc.servicer",
    "prefill_svc.app",
    "prefill_svc.servicer",
    "router.app",
    "router.serving.large_messages",
    "router.serving.servicer",
    "router.workers.decode_session",
    "router.workers.link",
    "router.workers.prefill_call",
)
"""Modules that may use generated stubs: servicers and their registration, conversion, and callers of a stub."""

TORCH_FREE = ("baton", "baton.client", "baton.cli.main", "router.app", "router.__main__")


@cache
def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: path for name, path in found.items() if not name.startswith("baton.pb.")}


@cache
def imports(module: str, *, at_load: bool) -> frozenset[str]:
    """Modules and names that a module imports anywhere, or only what runs when it is loaded."""
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    package = module if modules()[module].name == "__init__.py" else module.rpartition(".")[0]
    found: set[str] = set()
    for node in walk(tree, at_load=at_load):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*package.split(".")[: -node.level + 1 or None], node.module or ""])
                if node.level
                else node.module
            )
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return frozenset(found)


def walk(node: ast.AST, *, at_load: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if at_load and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if at_load and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from walk(child, at_load=at_load)


def loads(module: str) -> set[str]:
    """Modules that are imported when a module is loaded, directly or through ours; parents of packages too."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            waiting.extend(imports(name, at_load=True))
        if "." in name:
            waiting.append(name.rpartition(".")[0])
    return seen


def owner(name: str) -> str:
    """The module of ours that a name is, or is defined in; "" if it is not ours."""
    while name and name not in modules():
        name = name.rpartition(".")[0]
    return name


def touches(names: set[str] | frozenset[str], wall: tuple[str, ...]) -> set[str]:
    return {name for name in names if any(name == other or name.startswith(f"{other}.") for other in wall)}


def test_only_the_kv_format_spells_the_parts_of_kv() -> None:
    """Whoever else needs keys or values takes their names from there, or whatever parts the format has."""
    projections = "baton.model.layers"
    spelled = {
        module
        for module, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value in ("k", "v")
    }
    assert spelled <= {"baton.kv.format", projections}


def test_the_lists_name_what_exists() -> None:
    assert set(PURE) <= set(modules())
    assert {name for name in EDGES if name not in modules()} == set()


@pytest.mark.parametrize("service", [*SERVICES, *COMPOSED])
def test_services_never_import_each_other(service: str) -> None:
    others = tuple({*SERVICES, *COMPOSED} - {service, *COMPOSED.get(service, ())})
    for module in modules():
        if module.split(".")[0] == service:
            assert not touches(imports(module, at_load=False), others), module


def test_baton_imports_no_service() -> None:
    for module in modules():
        if module.split(".")[0] == "baton":
            assert not touches(imports(module, at_load=False), (*SERVICES, *COMPOSED)), module


def test_no_modules_import_each_other() -> None:
    """Not even for types, and not through others: what stands in no circle is removed until nothing is left."""
    waiting = {module: set(map(owner, imports(module, at_load=False))) - {module} for module in modules()}
    while free := {module for module, others in waiting.items() if not others & waiting.keys()}:
        waiting = {module: others for module, others in waiting.items() if module not in free}
    assert sorted(waiting) == []


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_load_nothing_impure(module: str) -> None:
    assert not touches(loads(module), IMPURE)
    assert not touches(imports(module, at_load=False), IMPURE)


def test_stubs_are_used_only_at_the_edges() -> None:
    users = {module for module in modules() if touches(imports(module, at_load=False), ("baton.pb",))}
    assert users - touches(users, EDGES) == set()


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (", ".join(TORCH_FREE), {"torch", "transformers", "numpy", "redis"}),
        ("baton", {"grpc", "google.protobuf", "click"}),
        ("router.app, router.__main__, router.processes", {"pydantic"}),
        ("baton.model.config, baton.model.checkpoint, baton.model.fingerprint", {"torch", "transformers", "numpy"}),
        (
            "mixed_svc.app, baton.engine.factory",
            {"transformers", "torch._dynamo", "sympy", "cryptography", "redis", "tokenizers", "jinja2"},
        ),
    ],
)
def test_no_process_loads_what_it_may_not_need(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; print(*{{*sys.modules}} & {heavy})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_default_executor_is_left_to_names() -> None:
    """A look-up that hangs holds its thread; work that shares these threads would wait for it (`executors`)."""
    found = []
    for path in (each for package in PACKAGES for each in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, first = node.func.attr, node.args[0] if node.args else None
                takes_default = isinstance(first, ast.Constant) and first.value is None
                if name == "to_thread" or (name == "run_in_executor" and takes_default):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert found == []


def test_the_installed_package_wins_over_a_folder_named_baton(tmp_path: Path) -> None:
    """As in the folder above a clone, which is a package without code for Python."""
    (tmp_path / "baton").mkdir()
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = "from baton import Client"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True)


@pytest.mark.parametrize("chosen", [None, "ERROR"])
@pytest.mark.parametrize("module", ["router.__main__", "prefill_svc.__main__, prefill_svc.app", "baton.cli.main"])
def test_grpc_is_quiet_before_it_is_loaded_unless_the_user_has_chosen(module: str, chosen: str | None) -> None:
    code = f"""
import os, sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_VERBOSITY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
import {module}
"""
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    environ |= {"GRPC_VERBOSITY": chosen} if chosen else {}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == (chosen or "NONE")
