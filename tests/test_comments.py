"""Files and modules that comments, docstrings and developer pages name exist."""

import ast
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.tree import PACKAGE, ROOT, name_of, nodes, parsed, sources

FILES = {
    path.relative_to(ROOT).as_posix()
    for suffix in ("py", "pyx", "pxd")
    for path in ROOT.glob(f"[!.]*/**/*.{suffix}")
}
MODULES = {path.stem for path in PACKAGE.rglob("*.py")}
PACKAGES = {path.stem for path in PACKAGE.iterdir()}
PAGES = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
QUOTED = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?<![\w./*-])((?:\w+/)*\w+\.(?:pyx|pxd|py))\b")
# Not paths, hosts, files, keys of events, or the start of a longer word.
DOTTED = re.compile(
    r"(?<![\w./\-\"'@$:])([a-z_]+(?:\.[A-Za-z_]\w*)+)(?<!\.py)(?<!\.json)(?<!\.md)(?![\w/-])"
)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
EXTERNAL = {"setup.py", "my_policies.py"}  # a file of pip, and an example for users


def exists(name: str) -> bool:
    return name in EXTERNAL or any(f"/{path}".endswith(f"/{name}") for path in FILES)


def test_every_named_file_exists():
    pages = {path: QUOTED.findall(path.read_text()) for path in PAGES}
    compiled = [*PACKAGE.rglob("*.pyx"), *PACKAGE.rglob("*.pxd")]
    texts = {path: [path.read_text()] for path in [*sources(), *sources(ROOT / "tools"), *compiled]}
    missing = {
        (where.name, name)
        for where, parts in (pages | texts).items()
        for text in parts
        for name in FILE.findall(text)
        if not exists(name)
    }
    assert missing == set()


def comments_and_docstrings(path):
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
    for node in nodes(path):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text


@cache
def defined(module: Path) -> set[str]:
    """All names that a module defines or uses, but none of its comments and docstrings."""
    return {
        *(node.id for node in nodes(module) if isinstance(node, ast.Name)),
        *(node.attr for node in nodes(module) if isinstance(node, ast.Attribute)),
        *(node.name for node in nodes(module) if isinstance(node, DOCUMENTED[1:])),
        *(node.name for node in nodes(module) if isinstance(node, ast.alias)),
        *(node.arg for node in nodes(module) if isinstance(node, ast.arg)),
    }


def resolves(folder: Path, name: str, words: set[str]) -> bool:
    """Whether `name` is a module below `folder`, or something in one. A name whose second part is
    no module may be an attribute or a key: `fleet.loads`, `server.port`."""
    parts = name.split(".")
    for number, part in enumerate(parts):
        if (folder / part / "__init__.py").exists():
            folder /= part
        elif (module := folder / f"{part}.py").exists():
            return number + 1 == len(parts) or parts[number + 1] in defined(module)
        elif number == 1:
            return part in words
        else:
            return part in defined(folder / "__init__.py")
    return True


def test_every_named_module_exists():
    """A name begins below the program's package, or below a folder of the file that has it."""
    words = {word for path in sources() for word in defined(path)}
    words.update(re.findall(r"\w+", (ROOT / "config/example.toml").read_text()))
    checked, missing = 0, set()
    for path in sources():
        above = [folder for folder in path.parents if PACKAGE in (folder, *folder.parents)]
        for text in comments_and_docstrings(path):
            for name in DOTTED.findall(text):
                inner = name.removeprefix("omni_proxy.")
                first = inner.split(".")[0]
                bases = [folder for folder in above if (folder / first / "__init__.py").exists()]
                checked += bool(bases)
                if bases and not any(resolves(folder, inner, words) for folder in bases):
                    missing.add((name_of(path), name))
    assert checked > 60
    assert missing == set()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("routing.inspect.large_json", True),
        ("routing.inspect.streamed", False),
        ("routing.pick.pick_worker", True),
        ("routing.pick.pick_nothing", False),
        ("fleet.loads", True),
        ("fleet.nothing", False),
    ],
)
def test_a_name_of_no_module_is_found(name, expected):
    assert resolves(PACKAGE, name, {"loads"}) is expected


def test_every_inlined_rule_is_listed():
    marked = re.compile(r"# inlined: ([\w., ]+)$", re.MULTILINE)
    rules = {
        (f"{path.parent.name}/{path.stem}", rule.strip())
        for path in sources()
        for names in marked.findall(path.read_text())
        for rule in names.split(",")
    }
    page = (ROOT / "docs/performance.md").read_text()
    rows = page.partition("### Inlined rules")[2].partition("###")[0]
    listed = {
        (file, rule)
        for line in rows.splitlines()
        if line.startswith("| `")
        for files, names in [line.strip("| ").split(" | ")]
        for file in QUOTED.findall(files)
        for rule in QUOTED.findall(names)
    }
    assert listed == rules
    assert len(rules) > 10


def test_every_module_quoted_with_a_class_exists():
    """`membership.CallHandler`: the short form for modules of the same package."""
    quoted = re.compile(r"See `(\w+)\.[A-Z]\w+`")
    named = {(path.name, name) for path in sources() for name in quoted.findall(path.read_text())}
    assert {name for _, name in named} >= {"membership", "peer_counts"}
    assert {(file, name) for file, name in named if name not in MODULES} == set()


def test_each_word_that_introduces_a_rule_has_one_form():
    """CONTRIBUTING.md explains them."""
    word = re.compile(r"(?:^|(?<=[.\n] ))(Invariants?|Contracts?)\b", re.MULTILINE)
    form = re.compile(r"(Invariants?|Contract)( of [\w` ]+| \(note:[\w. -]+\))?:\s(?!note:)")
    texts = {name_of(path): ast.get_docstring(parsed(path)) or "" for path in sources()}
    found = [(name, match) for name, text in texts.items() for match in word.finditer(text)]
    assert len(found) > 400
    others = {name for name, match in found if not form.match(texts[name], match.start())}
    assert others == set()


NOTES = {
    "omni-router", "api-server", "routers", "features", "real-engines", "two-phase", "weight-sync", "models",
    "config",
}  # fmt: skip


def test_a_citation_of_notes_has_one_form_and_is_no_page_of_this_repository():
    files = [*sources(), *sources(ROOT / "tools"), *sources(ROOT / "tests")]
    texts = {path: path.read_text() for path in files if path != Path(__file__)}
    cited = {name for text in texts.values() for name in re.findall(r"note:([\w-]+)", text)}
    assert cited == NOTES
    explained = (ROOT / "CONTRIBUTING.md").read_text().partition("\n`note:NAME SECTION`")[2]
    assert set(re.findall(r"`([\w-]+)`", explained.partition("\n\n")[0])) >= NOTES
    page = re.compile(rf"(?<![\w/.-])({'|'.join(NOTES)})\.md \d")
    assert {name_of(path) for path, text in texts.items() if page.search(text)} == set()
