import ast
import re
import subprocess
import sys

from tests.tree import PACKAGE, ROOT, imports, name_of, nodes, parsed, sources

PURE = (
    "config", "wire", "api_keys", "cluster", "fleet", "routing", "admin_ops", "discovery",
    "weight_sync/protocol",
)  # fmt: skip
PURE_MARKER = re.compile(r"\bPure[.:]")
OTHER_MARKERS = re.compile(r"\b(PURE|[Nn]o I/O|not do I/O|Pure[;,])")
# Modules with I/O, a clock, randomness, the environment, tasks or threads.
IMPURE = {
    "_thread", "anyio", "asyncio", "concurrent", "ctypes", "dns", "fcntl", "gc", "glob", "grpc", "hiredis",
    "http.client", "http.server", "httpcore", "httpx", "hypercorn", "importlib", "io", "logging", "mmap",
    "multiprocessing", "os", "pathlib", "queue", "quart", "quart_trio", "random", "secrets", "select", "selectors",
    "shutil", "signal", "socket", "ssl", "subprocess", "tempfile", "threading", "time", "torch", "trio",
    "urllib.request", "uuid", "watchfiles", "zmq",
}  # fmt: skip
IMPURE_CALLS = re.compile(
    r"(open|print|input|exec|eval|(datetime|date)\.(now|utcnow|today)|sys\.(stdin|stdout|stderr).*"
    r"|\w+\.(read_bytes|write_bytes|write_text))"
)
IMPURE_EXCEPTIONS = {
    "cli.flags.engine_commands": ({"os"}, "os.path.basename"),
    "cli.screen.diagnosis": ({"os"}, "os.path.basename"),
    "config.fields": ({"importlib"}, "problems list the names of installed policies"),
    "config.configuration_flags": ({"pathlib"}, "the type of a field"),
    "config.validate": ({"importlib"}, "a key that needs an optional package is refused without it"),
    "routing.policies.plugins": ({"importlib", "logging"}, "loads policies of other packages, logs their failures"),
    "weight_sync.store.manifest": ({"pathlib"}, "the type of a field"),
}  # fmt: skip
SHARED = ("native", "shared")  # by the proxy and the replica
# From the bottom to the top: a package imports only from packages before it.
LAYERS = (
    *SHARED, "wire", "config", "api_keys", "cluster", "system", "process_group", "fleet", "routing", "admin_ops", "discovery",
    "upstream_http", "runtime_config", "dataplane", "telemetry", "health", "launch", "discovery_watch",
    "weight_sync", "multiprocess", "kv_events", "cluster_member", "picker", "admin_api", "supervisor", "upgrade", "signals", "server", "replica", "simulate",
    "cli", "compat", "__main__",
)  # fmt: skip


def package_of(module: str) -> str:
    """`fleet` for omni_proxy.fleet.worker; "" for omni_proxy itself."""
    return module.split(".")[1] if module.count(".") else ""


def imported_packages(path) -> set[str]:
    modules = (module for module in imports(path) if module.startswith("omni_proxy."))
    # `from omni_proxy import __version__` names no package.
    return {package_of(module) for module in modules} - {"__version__"}


def test_a_package_imports_only_from_packages_below_it():
    above = {}
    for path in sources():
        if package := package_of(name_of(path)):
            allowed = {*LAYERS[: LAYERS.index(package)], package}
            above[name_of(path)] = imported_packages(path) - allowed
    assert {name: packages for name, packages in above.items() if packages} == {}


def pure_modules():
    packages = {path for name in PURE for path in sources(PACKAGE / name)}
    marked = {
        path for path in sources() if PURE_MARKER.search(ast.get_docstring(parsed(path)) or "")
    }
    return packages | marked


def impurities(path) -> set[str]:
    """The modules of IMPURE that a file imports, and its calls of IMPURE_CALLS."""
    names = {f"{module}." for module in imports(path)}
    calls = {ast.unparse(node.func) for node in nodes(path) if isinstance(node, ast.Call)}
    return {module for module in IMPURE if any(name.startswith(f"{module}.") for name in names)} | {
        call for call in calls if IMPURE_CALLS.fullmatch(call)
    }


def test_a_pure_module_does_no_io_and_reads_no_clock():
    found = {name_of(path).removeprefix("omni_proxy."): impurities(path) for path in pure_modules()}
    assert len(found) > 150
    expected = {name: modules for name, (modules, _) in IMPURE_EXCEPTIONS.items()}
    assert {name: modules for name, modules in found.items() if modules} == expected


def test_purity_has_one_marker_in_docstrings():
    texts = {name_of(path): ast.get_docstring(parsed(path)) or "" for path in sources()}
    assert {name for name, text in texts.items() if OTHER_MARKERS.search(text)} == set()


def test_io_and_clocks_are_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import os.path\nfrom datetime import datetime\nfrom urllib.parse import quote\n"
        "from importlib.metadata import entry_points\n"
        "def f(file, clock):\n  clock.now()\n  datetime.now()\n  file.write_text(quote(''))\n"
    )
    assert impurities(path) == {"os", "importlib", "datetime.now", "file.write_text"}


def test_the_replica_imports_only_what_is_shared_with_the_proxy():
    for path in sources(PACKAGE / "replica"):
        assert imported_packages(path) <= {"replica", "process_group", *SHARED}, path


def test_only_the_command_line_imports_the_replica():
    for path in sources():
        if package_of(name_of(path)) not in ("replica", "cli"):
            assert "replica" not in imported_packages(path), path


def test_starting_the_proxy_never_imports_what_few_programs_need():
    code = (
        "import sys, omni_proxy.cli.serve, omni_proxy.server, omni_proxy.process_group.rank_protocol; "
        "rare = {'torch', 'xllamacpp', 'numpy', 'openai', 'zmq', 'grpc', 'dns'}; "
        "print(*sorted(rare & sys.modules.keys()))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""


def test_every_package_has_a_layer():
    names = {path.stem for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names - {"py", "__init__", "_native"} == set(LAYERS)


def imported_files(path, names) -> set[str]:
    """The modules among `names` that a file imports, also those only for type checking."""
    imported = set()
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom):
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= (full & names) or ({node.module} & names)
        elif isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names} & names
    return imported - {name_of(path)}


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other directly or indirectly."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, waiting = set(), [start]
        while waiting:
            for module in graph[waiting.pop()] - seen:
                seen.add(module)
                waiting.append(module)
        reached[start] = seen
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return sorted((set(group) for group in groups), key=sorted)


def test_there_are_no_import_cycles_even_for_types():
    names = {name_of(path) for path in sources()}
    graph = {name_of(path): imported_files(path, names) for path in sources()}
    assert cycles(graph) == []


def inside(folder: str, graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between a folder's files and sub-folders; a sub-folder stands for all in it."""
    start = f"{folder}."

    def member(module: str) -> str:
        return module.removeprefix(start).partition(".")[0]

    imported: dict[str, set[str]] = {}
    for module, others in graph.items():
        if module.startswith(start):
            members = {member(other) for other in others if other.startswith(start)}
            imported.setdefault(member(module), set()).update(members - {member(module)})
    return imported


def test_the_files_and_folders_of_a_folder_import_each_other_one_way():
    names = {name_of(path) for path in sources()}
    graph = {name_of(path): imported_files(path, names) for path in sources()}
    folders = {name_of(path) for path in sources() if path.name == "__init__.py"}
    found = {folder: cycles(inside(folder, graph)) for folder in folders}
    assert len(folders) > 50
    assert {folder: groups for folder, groups in found.items() if groups} == {}


def test_a_cycle_over_two_folders_is_found_although_no_file_has_one():
    graph = {"p.a.low": set(), "p.b.one": {"p.a.low"}, "p.a.high": {"p.b.one"}, "p.c": {"p.a.high"}}
    assert cycles(graph) == []
    assert cycles(inside("p", graph)) == [{"a", "b"}]


def test_the_files_on_the_path_of_a_post_are_few_and_import_only_later_ones():
    design = (ROOT / "docs/design.md").read_text()
    names = re.findall(r"^\| \d+ \| `([\w/]+\.py)` \|", design, re.MULTILINE)
    assert names[0] == "dataplane/loop/event_loop.py"
    assert len(names) <= 11
    modules = [name_of(PACKAGE / name) for name in names]
    for number, name in enumerate(names):
        used = set(imports(PACKAGE / name))
        back = {
            module
            for module in used
            if module.startswith(tuple(f"{earlier}." for earlier in modules[:number]))
        }
        assert back == set(), name


def test_a_cycle_over_three_files_is_found():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
