"""One term for each thing, as defined in docs/glossary.md.

The last column of each table lists words that are not used for the thing. The tests search for them
in identifiers, file names, log events, pages, and in the files that are not in Python.
"""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.tree import PACKAGE, ROOT, name_of, nodes, parsed, sources

GLOSSARY = (ROOT / "docs/glossary.md").read_text()
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
# Ordinary words that are allowed in sentences, but not as names.
ONLY_NAMES = {
    "young", "told", "tells", "said", "wish", "wishes", "hurry", "hurried", "doubt", "hear", "hears",
    "heard", "unheard", "believe", "believes", "newcomer", "newcomers",
}  # fmt: skip
ORDINARY_IN_TESTS = {"mine"}  # as a request id
# In files without Python, these are allowed neither as names nor in sentences.
INFORMAL = {
    "anew", "asker", "graveyard", "nobody", "owed", "somebody", "tries", "trials", "whoever",
}  # fmt: skip
OLD_NAMES = {
    "tests.admin_api.routes.test_status_routes": {"door"},
    "tests.admin_api.routes.test_metrics_routes": {"door"},
    "tests.multiprocess.test_aggregate": {"introductions"},
    "tests.promises.http.test_forwarded": {"introductions"},
    "tests.telemetry.lint": {"door"},
    "tests.test_supervisor": {"pulse"},
}
WORD = re.compile("[a-z]+")
QUOTED = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


def rows():
    for line in GLOSSARY.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 4 and not set(cells[0]) <= {"-"}:
            yield cells


def banned():
    return {word.strip() for row in rows() for word in row[3].split(",") if row[0] != "Term"} - {""}


def words_of(identifier):
    """`read_ahead` and `ReadAhead`: read, ahead."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)
    return {part.lower() for part in parts}


def identifiers(path):
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def other_sources():
    """The dashboard, the files of contrib, Cython modules, C programs and shell scripts."""
    dashboard = PACKAGE / "admin_api" / "pages"
    yield from (path for path in dashboard.rglob("*") if path.is_file())
    yield from (path for path in (ROOT / "contrib").rglob("*") if path.is_file())
    for suffix in ("pyx", "pxd", "pyi"):
        yield from PACKAGE.rglob(f"*.{suffix}")
    yield from (ROOT / "tools").rglob("*.[ch]")
    yield from (path for path in (ROOT / "tools").iterdir() if path.is_file() and not path.suffix)


@cache
def suspects():
    """The files of tests and tools that may have a banned word: parsing all takes seconds."""
    words = banned()
    small, large = "|".join(words), "|".join(word.upper() for word in words)
    first = "|".join(word.capitalize() for word in words)
    pattern = re.compile(
        rf"(?<![a-zA-Z])({small})(?![a-z])|({first})(?![a-z])|(?<![A-Z])({large})(?![A-Z])"
    )
    paths = [*sources(ROOT / "tests"), *sources(ROOT / "tools")]
    return [path for path in paths if pattern.search(f"{path.stem}\n{path.read_text()}")]


def texts(path):
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            yield node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def test_the_glossary_is_parsed():
    assert len(list(rows())) > 50
    assert len(banned()) > 25
    assert {"keeper", "leash", "mine"} <= banned()


def test_no_identifier_or_file_name_has_a_banned_word():
    banned_words = banned()
    found = {
        name_of(path): {
            name for name in {*identifiers(path), path.stem} if words_of(name) & banned_words
        }
        for path in sources()
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_no_identifier_of_tests_or_tools_has_a_banned_word():
    """`Doorkeeper` is a part of TinyLFU in its paper, `collective_rpc` a route of vLLM."""
    banned_words = banned()
    found = {
        name_of(path): {
            name
            for name in {*identifiers(path), path.stem}
            if words_of(name.replace("Doorkeeper", "").replace("collective_rpc", "")) & banned_words
        }
        for path in suspects()
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_no_string_in_tests_or_tools_has_a_banned_word():
    """Hosts, names and docstrings. Old names of the program are allowed where they are tested."""
    banned_words = banned() - ONLY_NAMES - ORDINARY_IN_TESTS
    found = {
        name_of(path): {
            word
            for text in texts(path)
            for word in set(WORD.findall(text.replace("collective_rpc", "").lower())) & banned_words
        }
        - OLD_NAMES.get(name_of(path), set())
        for path in suspects()
        if path != Path(__file__)
    }
    assert {path: words for path, words in found.items() if words} == {}


def test_no_other_file_has_a_banned_word():
    """Names, comments and texts alike, because these files are not parsed."""
    paths = list(other_sources())
    suffixes = {path.suffix for path in paths}
    assert suffixes >= {".js", ".css", ".html", ".c", ".h", ".pyx", ".pxd", ".yaml", ".json", ""}
    banned_words = banned() | INFORMAL
    found = {
        str(path.relative_to(ROOT)): words_of(f"{path.name}\n{path.read_text()}") & banned_words
        for path in paths
    }
    assert {path: words for path, words in found.items() if words} == {}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_has_a_banned_word(path):
    text = GLOSSARY if path.name == "glossary.md" else path.read_text()
    if path.name == "glossary.md":
        text = "\n".join(" ".join(row[:2]) for row in rows())
    words = set(re.findall(r"[a-z]+", QUOTED.sub("", text).lower()))
    assert words & (banned() - ONLY_NAMES) == set()


def test_no_public_class_name_is_used_in_two_files():
    files = {}
    for path in sources(PACKAGE):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files.setdefault(node.name, []).append(name_of(path))
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}


@pytest.mark.parametrize(
    ("term", "file"),
    [
        ("retry", "dataplane/attempt/retry.py"),
        ("response relay", "dataplane/relay/response_relay.py"),
        ("config reloader", "runtime_config/reloader.py"),
        ("health prober", "health/prober.py"),
        ("outlier ejection", "fleet/outlier_ejection.py"),
        ("cache aware", "routing/policies/cache_aware.py"),
        ("admission queue", "dataplane/admission/queue.py"),
        ("access log", "dataplane/exchange/access_log.py"),
        ("tls termination", "dataplane/downstream/tls_termination.py"),
        ("version store", "weight_sync/store/version_store.py"),
        ("protocol trainer group", "weight_sync/protocol/trainer_group.py"),
        ("shared memory counters", "multiprocess/shared_memory/worker_counters.py"),
        ("chat template", "replica/models/chat_template.py"),
        ("prefix cache", "replica/text/prefix_cache.py"),
        ("signals", "signals.py"),
        ("rollback", "weight_sync/operations/rollback.py"),
        ("slow start", "routing/policies/slow_start.py"),
        ("trainer group", "weight_sync/protocol/trainer_group.py"),
        ("abort", "dataplane/abort.py"),
        ("websocket relay", "dataplane/websocket_relay.py"),
        ("version constraint", "routing/version_constraint.py"),
    ],
)
def test_a_term_of_the_field_leads_to_the_file_with_its_name(term, file):
    assert (PACKAGE / file).exists()
    assert set(term.split()) <= words_of(file)
