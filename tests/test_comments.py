"""Files and modules that comments, docstrings and developer pages name exist."""

import re

from tests.tree import PACKAGE, ROOT, sources

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
DOTTED = re.compile(r"(?:omni_proxy\.)?(\w+)\.(\w+)(?:\.\w+)*")
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


def test_every_quoted_module_exists():
    texts = {path: path.read_text() for path in sources()}
    # Attributes and keys are written like modules: `fleet.loads`, `server.port`.
    words = {word for text in texts.values() for word in re.findall(r"\w+", QUOTED.sub("", text))}
    words.update(re.findall(r"\w+", (ROOT / "config/example.toml").read_text()))
    missing = {
        (where.name, quoted)
        for where, text in texts.items()
        for quoted in QUOTED.findall(text)
        if (match := DOTTED.fullmatch(quoted)) and match[1] in PACKAGES and match[2] not in words
    }
    assert missing == set()


def test_every_module_quoted_with_a_class_exists():
    """`membership.CallHandler`: the short form for modules of the same package."""
    quoted = re.compile(r"See `(\w+)\.[A-Z]\w+`")
    named = {(path.name, name) for path in sources() for name in quoted.findall(path.read_text())}
    assert {name for _, name in named} >= {"membership", "peer_counts"}
    assert {(file, name) for file, name in named if name not in MODULES} == set()
