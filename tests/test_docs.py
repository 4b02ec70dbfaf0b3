import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from omni_proxy.admin_api.routes.operations.weight_routes import CONFIGURED
from omni_proxy.cli import COMMANDS, logs, simulate
from omni_proxy.cli.flags.engine_commands import ENGINES
from omni_proxy.cli.flags.start_parsers import (
    check_parser,
    launch_parser,
    picker_parser,
    router_parser,
    serve_parser,
)
from omni_proxy.config.fields import POLICIES
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import (
    CacheAwareConfig,
    PrefixHashConfig,
    RoutingConfig,
    TimeoutsConfig,
)
from omni_proxy.replica import profile_report as profile
from omni_proxy.replica import replica_command as replica
from omni_proxy.replica.http_server import _app
from omni_proxy.replica.pipeline.builtin import BuiltinOptions, builtin_pipeline
from omni_proxy.replica.pipeline.client import Client
from omni_proxy.replica.pipeline.config import compile_plan, parse_pipeline
from omni_proxy.replica.pipeline.coordination.coordinator import Coordinator
from omni_proxy.replica.pipeline.runtime import Runtime
from omni_proxy.routing import routes
from tests.admin_api.api_fixture import A, build_api, entry
from tests.test_layers import LAYERS, PURE
from tests.tree import PACKAGE, parsed

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
HTTP = (ROOT / "docs/http.md").read_text()
DESIGN = (ROOT / "docs/design.md").read_text()
ROUTING = (ROOT / "docs/routing.md").read_text()
MIGRATION = (ROOT / "docs/migration.md").read_text()
REPLICA = (ROOT / "docs/replica.md").read_text()
INSTALL = (ROOT / "docs/install.md").read_text()
START = (ROOT / "docs/start.md").read_text()
TRAINERS = (ROOT / "docs/trainers.md").read_text()
WEIGHT_SYNC = (ROOT / "docs/weight-sync.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
GUIDES = (
    README, ROUTING, MIGRATION, REPLICA, INSTALL, START, TRAINERS, CONFIGURATION, OPERATIONS,
)  # fmt: skip
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md",
    *sorted(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")),
)  # fmt: skip

PLACES = {"{path}": "x", "{worker_id}": A, "{request_id}": "abc", "{name}": "anna", "{caller}": "a"}


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.DOTALL | re.MULTILINE)


def filled(path):
    for place, value in PLACES.items():
        path = path.replace(place, value)
    return path


@pytest.mark.parametrize("page", PAGES)
def test_every_link_and_path_leads_to_a_file(page):
    text = (ROOT / page).read_text()
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
        assert (folder / target).exists(), target
    for path in re.findall(r"(?<![\w/])(?:tools|config|docs|tests)/[a-z]\w*(?:[-./]\w+)*", text):
        if path != "config/example.state.toml":  # the running program writes it
            assert (ROOT / path).exists(), path


def headings(text):
    """The anchors of a page's headings, as GitHub makes them."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", outside, re.MULTILINE)
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_heading_leads_to_one(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", (ROOT / page).read_text())
    for target, anchor in links:
        path = (ROOT / page).parent / target if target else ROOT / page
        assert anchor in headings(path.read_text()), (target, anchor)


def test_the_decisions_begin_with_a_list_of_all_in_their_order():
    section = DESIGN.partition("\n## Decisions\n")[2].partition("\n## ")[0]
    contents = section.partition("\n### ")[0]
    assert re.findall(r"\]\(#([^)]+)\)", contents) == headings(section)


def test_every_module_of_the_design_exists():
    modules = re.findall(r"`((?:\w+/)*\w+\.py)`", DESIGN)
    assert modules
    for module in modules:
        assert list((ROOT / "omni_proxy").rglob(module)), module


@pytest.mark.parametrize(
    "line",
    [
        line
        for page in GUIDES
        for block in blocks(page, "sh")
        for line in block.splitlines()
        if line
    ],
)
def test_every_shown_command_is_valid(line):
    match shlex.split(line, comments=True):
        case ["omni-proxy", *words]:
            assert_accepted(words)
        case ["python", "-m", module, *_]:
            assert (ROOT / module.replace(".", "/") / "__main__.py").exists()
        case ["pip", "install", "." | ".[replica]"]:
            pass
        case ["echo", body, "|", *words]:
            json.loads(body)
            assert words[0] == "omni-proxy"
            assert_accepted(words[1:])
        case ["curl", *words]:
            url = next(word for word in words if word.startswith("http"))
            method = "POST" if {"-X", "-d"} & set(words) else "GET"
            assert (method, re.sub(r"https?://[^/]+|[?].*", "", url)) in documented_routes()
            for body in words[words.index("-d") + 1 :][:1] if "-d" in words else ():
                json.loads(body)
        case [script, *_]:
            assert (ROOT / script).stat().st_mode & 0o100


@pytest.mark.parametrize(
    "page",
    GUIDES,
    ids=(
        "readme", "routing", "migration", "replica", "install", "start", "trainers",
        "configuration", "operations",
    ),
)  # fmt: skip
def test_inline_commands_are_valid(page):
    commands = [
        command for command in re.findall(r"`omni-proxy ([^`]+)`", page) if "…" not in command
    ]
    assert commands or page in (ROUTING, OPERATIONS)
    for command in commands:
        assert_accepted(shlex.split(command))


def assert_accepted(words):
    match words:
        case [*_, "--help" | "--version"]:
            pass
        case ["check", *rest]:
            check_parser().parse_args(rest)
        case [
            "status"
            | "top"
            | "workers"
            | "explain"
            | "logs"
            | "weights"
            | "completion"
            | "init"
            | "bench"
            | "schema"
            | "keys",
            *rest,
        ]:
            importlib.import_module(COMMANDS[words[0]]).parser().parse_args(rest)
        case ["simulate" | "trace" as command, *rest]:
            parser_of = {"simulate": simulate.parser, "trace": logs.trace_parser}
            parser_of[command]().parse_args(rest)
        case ["launch", *rest]:
            launch_parser(tuple(ENGINES)).parse_known_args(rest)
        case ["launch-router" | "picker" as command, *rest]:
            parser_of = {"launch-router": router_parser, "picker": picker_parser}
            parser_of[command]().parse_args(rest)
        case ["replica", "fetch", *rest]:
            replica.fetch_parser().parse_args(rest)
        case ["replica", "profile", *rest]:
            profile.parser().parse_args(rest)
        case ["replica", *rest]:
            replica.serve_parser().parse_args(rest)
        case _:
            serve_parser().parse_args(words)


def test_the_shown_configurations_are_valid():
    pages = (README, ROUTING, MIGRATION, START, TRAINERS, WEIGHT_SYNC, OPERATIONS)
    whole = [text for page in pages for text in blocks(page, "toml")]
    assert len(whole) == 24
    for text in whole:
        parse(text)


def test_the_shown_pipelines_are_valid_and_have_every_key():
    apart, omni = (tomllib.loads(text) for text in blocks(REPLICA, "toml"))
    assert parse_pipeline(apart).name == "apart"
    read = parse_pipeline(omni)
    built = builtin_pipeline(BuiltinOptions(speech="hibari", transcription="whisper-tiny"))
    assert (read.entry, read.entries) == (built.entry, built.entries)
    assert {s.name: (s.factory, s.next, s.stream_to, s.route, s.terminal) for s in read.stages} == {
        s.name: (s.factory, s.next, s.stream_to, s.route, s.terminal) for s in built.stages
    }
    shown_keys = set(apart) | {key for stage in apart["stages"] for key in stage}
    shown_keys |= set(re.findall(r"`(\w+)`", REPLICA))
    keys = {*type(read).__dataclass_fields__, *type(read.stages[0]).__dataclass_fields__}
    assert keys - shown_keys == set()


def test_documented_defaults_are_the_defaults():
    tables = ("[routing.prefix_hash]", "[routing.cache_aware]")
    texts = [text for text in blocks(ROUTING, "toml") if any(name in text for name in tables)]
    shown = [parse(text).routing for text in texts]
    assert [routing.policy for routing in shown] == ["prefix_hash", "cache_aware"]
    assert shown[0].prefix_hash == PrefixHashConfig()
    assert shown[1].cache_aware == CacheAwareConfig()
    text = next(text for text in blocks(ROUTING, "toml") if "cache_threshold" in text)
    assert set(tomllib.loads(text)["routing"]["cache_aware"]) == set(
        CacheAwareConfig.__struct_fields__
    )


def test_every_policy_and_every_key_of_routing_is_explained():
    named = set(re.findall(r"\w+", ROUTING))
    elsewhere = {"model", "voice_owner", "while_paused"}
    for struct in (RoutingConfig, CacheAwareConfig, PrefixHashConfig):
        assert set(struct.__struct_fields__) - named - elsewhere == set()
    overview = ROUTING.partition("### round_robin")[0]
    table_of_policies = re.findall(r"^\| `(\w+)`.* \| .* \| .* \|$", overview, re.MULTILINE)[1:]
    assert sorted(table_of_policies) == sorted(POLICIES)


def test_every_list_of_policies_has_exactly_the_built_in_policies():
    reasons = ROUTING.partition("`reason`, for example")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", reasons, re.MULTILINE)) == set(POLICIES)
    example = (ROOT / "config/example.toml").read_text()
    (comment,) = re.findall(r"^policy = .*?# (.*)$", example, re.MULTILINE)
    for text in (comment, serve_parser().format_help().partition("--policy NAME")[2][:400]):
        named = [name for name in re.findall(r"[a-z]+(?:_[a-z]+)*", text) if name in POLICIES]
        assert sorted(set(named)) == sorted(POLICIES), text
    (row,) = re.findall(r"^\| `policy` \| ([^|]*) \|", CONFIGURATION, re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == list(POLICIES)
    pages = f"{README}\n{START}\n{OPERATIONS}\n{MIGRATION}\n{example}"
    assert set(re.findall(r"policy = \"(\w+)\"", pages)) <= set(POLICIES)


def test_flags_documented_as_equal_exist():
    text = MIGRATION.partition("Same name, same meaning")[2].partition("Different names")[0]
    flags = re.findall(r"`(--[\w-]+)`", text)
    assert len(flags) > 25
    known = set(re.findall(r"--[\w-]+", launch_parser(tuple(ENGINES)).format_help()))
    assert set(flags) <= known
    own_names = re.findall(r"^\| `--[^|]*\| `(--[\w-]+)", MIGRATION, re.MULTILINE)
    assert own_names
    assert set(own_names) <= known


def test_the_documented_routes_of_the_replica_are_those_it_serves():
    # No stage is started: an app uses stages only for requests.
    plan = compile_plan(builtin_pipeline(BuiltinOptions()))
    client = Client(Coordinator(plan, Runtime(plan.config.stages)))
    served = set()
    for rule in _app(client, {"model_name": "tiny"}).url_map.iter_rules():
        path = rule.rule.replace("<path:name>", "{id}")
        path = re.sub("<(request_id|response_id|name)>", r"{\1}", path)
        served |= {(method, path) for method in rule.methods - {"HEAD", "OPTIONS"}}
    documented = set(re.findall(r"`(GET|POST|DELETE) (/[^`\s]*)`", REPLICA))
    assert documented - served == set()
    # Weight routes are documented on another page.
    undocumented = {path for _, path in served - documented if "weight" not in path}
    assert undocumented <= {"/favicon.ico", "/docs/oauth2-redirect"}


@pytest.mark.parametrize("number", range(3))
def test_the_shown_programs_run(number, tmp_path):
    text = blocks(REPLICA, "python")[number]
    compile(text, "docs/replica.md", "exec")
    if "launch_server" in text:
        return  # it would not end
    for module in ("torch", "tiktoken"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install 'omni-proxy[replica]'")
    result = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}, cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] in ("length 8", "tiny")


def documented_routes():
    return sorted(set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^`\s?]*)`", HTTP)))


@pytest.mark.parametrize(("method", "path"), documented_routes())
async def test_every_documented_route_is_served(method, path):
    if routes.match_route(method, filled(path)) is None:
        api = build_api(entry(A))
        api.data_plane.draining = True  # ends the event feed
        response = await api.client().open(filled(path), method=method)
        if path == "/weights/rollback":  # the route exists, but no version
            assert (await response.get_json())["error"]["code"] == "no_versions"
            return
        if path == "/keys/{caller}":  # the route exists, but no caller
            assert (await response.get_json())["error"]["code"] == "unknown_caller"
            return
        assert response.status_code not in (404, 405)


def test_every_route_is_documented():
    served = {(method, route.path) for route in routes.ALL_ROUTES for method in route.methods}
    rules = build_api().app.url_map.iter_rules()
    for rule in (each for each in rules if each.rule != CONFIGURED):
        path = rule.rule.replace("<path:path>", "{path}").replace("<path:model>", "{model}")
        path = path.replace("<path:reservation_id>", "{id}").replace("<path:caller>", "{caller}")
        path = re.sub(r"<[^>]+>", "{worker_id}", path)
        served |= {(method, path) for method in rule.methods - {"HEAD", "OPTIONS"}}
    assert served == set(documented_routes())


def test_every_timeout_is_in_the_operations_guide():
    keys = TimeoutsConfig.__struct_fields__
    assert {key for key in keys if f"`{key}`" not in OPERATIONS} == set()


def test_every_dependency_has_its_reason_in_the_design():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}
    first_cells = re.findall(r"^\| ([^|]+) \|", DESIGN, re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"[\w-]+", cell)}
    assert names <= named


def recipes():
    parameters = []
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for title, recipe in re.findall(
        r"^## (Add .*?)\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE
    ):
        example = re.search(r"as `([^`]+)` was", recipe, re.IGNORECASE)[1]
        files = re.findall(r"`((?:omni_proxy|tests|docs|config)/[\w/.]+\.\w+)`", recipe)
        parameters.append(pytest.param(example, files, id=title))
    return parameters


# These contain examples but are in no recipe: tools write them, they belong to the other server, or
# they only pass the value on.
WRITTEN_BY_TOOLS = {"omni_proxy/cli/config_file/schema.json", "docs/configuration.md"}
# In recipes because others may need them; the examples do not.
ONLY_IF_NEEDED = {
    "omni_proxy/admin_api/app.py", "omni_proxy/server.py", "omni_proxy/config/configuration_flags.py",
    "omni_proxy/config/diff.py",
}  # fmt: skip
NOT_IN_RECIPES = (
    "omni_proxy/replica/",
    "omni_proxy/dataplane/exchange/",
    "omni_proxy/dataplane/disaggregation/",
)


def files_with_name(example):
    name = re.compile(rf"\b{re.escape(example.removeprefix('/'))}\b")
    files = [*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js"), ROOT / "config/example.toml"]
    return {str(file.relative_to(ROOT)) for file in files if name.search(file.read_text())}


@pytest.mark.parametrize(("example", "files"), recipes())
def test_a_recipe_names_files_that_contain_its_example(example, files):
    assert len(files) >= 3
    for file in set(files) - WRITTEN_BY_TOOLS - ONLY_IF_NEEDED:
        assert example.removeprefix("/") in (ROOT / file).read_text(), file


@pytest.mark.parametrize(("example", "files"), recipes())
def test_a_recipe_names_all_files_that_contain_its_example(example, files):
    needed = {file for file in files_with_name(example) if not file.startswith(NOT_IN_RECIPES)}
    assert needed <= set(files)


def test_there_is_a_recipe_for_each_frequent_addition():
    assert [recipe.id for recipe in recipes()] == [
        "Add a policy", "Add a route", "Add a configuration key", "Add a metric of the program",
        "Add a metric of requests",
    ]  # fmt: skip


def test_the_list_of_packages_has_the_order_of_the_layers():
    section = DESIGN.partition("\n## Packages\n")[2].partition("\n## ")[0]
    packages, replica = re.findall(r"^```\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    rows = re.findall(r"^(\w+)(/|\.py) +(PURE|)", packages, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(reversed(LAYERS))
    assert {f"{name}{kind}" for name, kind, _ in rows if (PACKAGE / name).is_dir()} == {
        f"{path.parent.name}/" for path in PACKAGE.glob("*/__init__.py")
    }
    assert {name for name, _, pure in rows if pure} == {name for name in PURE if "/" not in name}
    folders = {path.parent.name for path in PACKAGE.glob("replica/*/__init__.py")}
    assert set(re.findall(r"^(\w+)/ ", replica, re.MULTILINE)) == folders


def module_exists(name):
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def classes_of(module):
    path = PACKAGE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return {node.name for node in parsed(file).body if isinstance(node, ast.ClassDef)}


def test_the_contracts_name_each_module_or_class_once_by_its_full_path():
    section = DESIGN.partition("\n## Contracts\n")[2].partition("\n## ")[0]
    table, _, silent = section.partition("\n\nNo input of ")
    names = [*re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE), *re.findall("`(.*?)`", silent)]
    assert len(names) > 90
    assert {name for name in names if names.count(name) > 1} == set()
    for name in names:
        module, _, last = name.rpartition(".")
        assert module_exists(name) or (module_exists(module) and last in classes_of(module)), name
