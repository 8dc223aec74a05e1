"""How modules may import one another."""

import ast
import dataclasses
import functools
import graphlib
import re
from pathlib import Path

import pytest

from docs.site_hooks import markdown_of
from pallas_paged.engine.requests.sequence import Sequence

ROOT = Path(__file__).parents[1]


@functools.cache
def imports_of(path: Path) -> set[str]:
    """What a file imports, inside functions too: `a.b` for `import a.b` and `from a import b`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("package", ["pallas_paged", "models", "bench"])
def test_imports_make_no_circle(package):
    paths = {name_of(path): path for path in (ROOT / package).rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for name, path in paths.items():
        # Of a name that is not a module, the module that it is imported from.
        imports = {x if x in paths else x.rpartition(".")[0] for x in imports_of(path)}
        graph[name] = imports & paths.keys()
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError with the circle


# Lowest first.
ROOMS = ["checks", "pages", "kernels", "attention", "experts", "decoder"]
ROOMS += ["engine", "interop", "server", "info"]
MODEL_ROOMS = ["files", "text", "decoder", "train", "command", "generate", "server"]


@pytest.mark.parametrize(
    ("package", "rooms", "room"),
    [("pallas_paged", ROOMS, x) for x in ROOMS] + [("models", MODEL_ROOMS, x) for x in MODEL_ROOMS],
)
def test_a_room_imports_from_lower_rooms_only(package, rooms, room):
    higher = {f"{package}.{name}" for name in rooms[rooms.index(room) + 1 :]}
    folder = ROOT / package
    for path in [folder / f"{room}.py", *(folder / room).rglob("*.py")]:
        if path.exists():
            upward = {name for name in imports_of(path) if ".".join(name.split(".")[:2]) in higher}
            assert not upward, path


def test_the_library_imports_nothing_of_the_checkout():
    for path in (ROOT / "pallas_paged").rglob("*.py"):
        assert not {name.split(".")[0] for name in imports_of(path)} & {"models", "bench", "tests"}


def test_requests_and_schedule_import_no_jax():
    """The host's part of the engine: integers, texts and NumPy."""
    paths = {name_of(path): path for path in (ROOT / "pallas_paged/engine").rglob("*.py")}
    rooms = "pallas_paged.engine.requests.", "pallas_paged.engine.schedule."
    todo = [name for name in paths if name.startswith(rooms)]
    assert {name.split(".")[2] for name in todo} == {"requests", "schedule"}
    seen = {*todo}
    for name in todo:
        for found in imports_of(paths[name]):
            assert found.split(".")[0] not in ("jax", "jaxlib"), f"{name} imports {found}"
            if (module := found.rpartition(".")[0]) in paths and module not in seen:
                seen.add(module)
                todo.append(module)


@pytest.mark.parametrize("index", range(4))
def test_a_room_of_the_engine_imports_no_higher_one(index):
    rooms = [("requests", "schedule"), ("sampling",), ("device",), ("replica",)]  # lowest first
    higher = {f"pallas_paged.engine.{name}" for some in rooms[index + 1 :] for name in some}
    for path in (
        x for name in rooms[index] for x in (ROOT / "pallas_paged/engine" / name).iterdir()
    ):
        if path.suffix == ".py":
            upward = {x for x in imports_of(path) if ".".join(x.split(".")[:3]) in higher}
            assert not upward, path


# Who writes the fields of a sequence; each has one owner.
OWNERS = {
    "requests/sequence.py": (
        "request output token_ids max_len mode stop_token_ids detokenizer grammar is_forced"
        " num_unforced routed_experts"
    ),
    "schedule/scheduler.py": "slot num_computed num_pending decoding fork_source forks",
    "schedule/kv_cache_manager.py": "num_stored pages window_pages lease caches block_hashes",
}
MUTATORS = {"append", "extend", "insert", "remove", "pop", "clear", "sort"}


def fields_written_by(path: Path) -> set[str]:
    """Attributes of other objects than `self` that a file assigns to, or changes as lists."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        written = node if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del) else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            written = node.func.value if node.func.attr in MUTATORS else None
        if isinstance(written, ast.Attribute) and getattr(written.value, "id", "") != "self":
            found.add(written.attr)
    return found


def test_fields_of_a_sequence_are_written_by_their_owner_only():
    engine = ROOT / "pallas_paged/engine"
    written = {str(x.relative_to(engine)): fields_written_by(x) for x in engine.rglob("*.py")}
    fields = {name: owner for owner, names in OWNERS.items() for name in names.split()}
    assert {*fields} == {field.name for field in dataclasses.fields(Sequence)}
    for path, names in written.items():
        for name in names & fields.keys():
            assert fields[name] == path, f"{path} writes {name}"
    assert {"slot", "num_computed", "num_pending"} <= written["schedule/scheduler.py"]


@pytest.mark.parametrize(
    ("package", "rooms"), [("pallas_paged", ROOMS), ("models", [*MODEL_ROOMS, "checkpoints"])]
)
def test_every_module_is_in_a_room(package, rooms):
    paths = (ROOT / package).iterdir()
    names = {path.stem for path in paths if path.is_dir() or path.suffix == ".py"}
    assert names - {"__init__", "__pycache__"} == {*rooms}


def test_no_test_module_imports_another_or_conftest():
    for path in (ROOT / "tests").rglob("*.py"):
        for name in imports_of(path):
            shared = not name.startswith("tests.") or name.startswith("tests.support.")
            assert shared or not ({"conftest"} & set(name.split(".")) or ".test_" in name), path


def test_users_are_told_of_public_names_only():
    """A public name is in the `__all__` of its module: what documents, examples and models use."""
    users = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in users)
    for path in ROOT.glob("examples/notebooks/*.ipynb"):
        code += markdown_of(path.read_text(encoding="utf-8"))
    models = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("models/**/*.py"))
    pattern = re.compile(r"^from (pallas_paged[\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)
    for module, names in pattern.findall(code + models):
        if module.startswith(
            ("pallas_paged.checks", "pallas_paged.engine.", "pallas_paged.server.")
        ):
            continue  # of models
        path = ROOT.joinpath(*module.split("."))
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        public = re.search(r"__all__ = \[(.*?)\]", source.read_text(encoding="utf-8"), re.DOTALL)
        for name in re.findall(r"(?:^|[(,\s])(\w+)(?: as \w+)?", names.partition("#")[0]):
            is_module = (path / f"{name}.py").exists()
            assert name == "as" or is_module or f'"{name}"' in (public[1] if public else ""), (
                f"{name} of {module}"
            )
