"""Generates docs/configuration.md from the schema and the comments of config/example.toml, and the
JSON schema of the file (configuration_schema.py) from the same sources.

Invariant: nothing about a single key is written here. The values that a key accepts come from its
type; its meaning comes from its comment in the example or, if that only lists the choices, from the
comment above it in the schema.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
from msgspec import inspect as types

from omni_proxy.config import schema, tables
from omni_proxy.config.configuration_flags import FLAGS
from omni_proxy.config.fields import (
    POLICIES,
    read_address,
    read_endpoint,
    read_header_name,
    read_host,
    read_host_name,
    read_kv_events,
    read_kv_replay,
    read_listen,
    read_log_target,
    read_mode,
    read_optional_policy,
    read_optional_url,
    read_origin,
    read_otlp_endpoint,
    read_policy,
    read_size,
    read_worker_url,
)
from omni_proxy.config.problem import to_toml_literal
from omni_proxy.config.tables.cluster import read_cluster_name, read_node_name, read_store_url
from omni_proxy.config.tables.discover import (
    read_api_server,
    read_dns_name,
    read_dns_server,
    read_label,
    read_selector,
)
from omni_proxy.config.tables.keys import (
    MAX_NAME,
    read_key_name,
    read_key_sha256,
    read_key_variable,
)
from tools import configuration_schema

ROOT: Final = Path(__file__).parent.parent
FILLERS: Final = {"or", "the", "default"}  # words around a bare list of choices
SCHEMA: Final = configuration_schema.TARGET
PAGE: Final = ROOT / "docs/configuration.md"
EXAMPLE: Final = ROOT / "config/example.toml"
# Bounds that only catch typing errors are not shown.
SLIP: Final = 1_000_000_000
READ_AS: Final = {
    read_size: 'bytes, or a string such as "64MiB"',
    read_endpoint: "a path",
    read_header_name: "the name of a header, or empty",
    read_worker_url: "a base URL, or unix:PATH",
    read_optional_url: "the URL of a worker, or empty",
    read_address: "an address or a name",
    read_origin: "origins of pages",
    read_otlp_endpoint: "the base URL of a collector",
    read_host_name: "host names without ports",
    read_log_target: '`"off"`, `"-"` for stdout, or a path',
    read_host: "an address or a name, or unix:PATH",
    read_listen: "host:port, or unix:PATH",
    read_policy: ", ".join(f"`{name}`" for name in POLICIES) + ", or a policy of your own",
    read_optional_policy: "a policy, or empty",
    read_key_name: f"1 to {MAX_NAME} letters, digits and `_.:@/-`",
    read_key_variable: "the name of an environment variable, or empty",
    read_key_sha256: "64 hex digits, or empty",
    read_kv_events: '`"tcp://host:port"`, `"auto"` or `"off"`',
    read_kv_replay: "`tcp://host:port`, or empty",
    read_selector: "a label selector",
    read_label: "the key of a label, or empty",
    read_api_server: "a base URL, or empty",
    read_dns_name: "a DNS name, or empty",
    read_dns_server: "host:port, or empty",
    read_mode: 'a file mode in octal, such as "0660"',
    read_store_url: "`redis://` or `rediss://` URL, or empty",
    read_cluster_name: "1 to 64 letters, digits and `_.:@/-`",
    read_node_name: "a name as of the cluster, or empty",
}
HEAD: Final = """# Configuration

Every table and key of the file, generated from the program by `tools/configuration-page`. A file
with all of them is [config/example.toml](../config/example.toml), and
`omni-proxy check config/example.toml` validates a file without starting anything.
[routing.md](routing.md) explains the policies, [trainers.md](trainers.md) the weights.

* Only keys marked as required are required, and no table is. An unknown key is refused; the message
  suggests the most similar one.
* Every key is hot: it applies when the file is saved. SIGHUP and `POST /reload` do the same,
  nothing needs a restart, and a file that is refused changes nothing.
* A flag, where a key has one, wins over the file.

`omni-proxy init FILE` writes a first file with comments. It asks for the workers' URLs, the policy,
the address, the access log and, if other machines can connect, the admin key. Flags replace the
questions, and an existing file is not overwritten without `--force`. The new file passes `check`.

`omni-proxy schema` prints the JSON schema of the file, and `omni-proxy init --schema` writes it
next to FILE. Editors with taplo, such as Even Better TOML, then complete keys and mark invalid ones
in a file whose first line is

```toml
#:schema ./omni-proxy.schema.json
```

For the same checks on the command line, for example in CI, run `taplo lint proxy.toml`
(`pip install taplo`).
"""


def page() -> str:
    """The complete text of the page."""
    comments = _comments()
    parts = [HEAD]
    for path, struct, several in _tables(schema.Config):
        title = f"[[{path}]]" if several else f"[{path}]"
        lead = _lead(struct, several)
        rows = [_row(path, struct, each, comments) for each in _keys(struct)]
        head = "| key | takes | default | meaning |\n|---|---|---|---|"
        parts.append(f"## `{title}`\n\n{lead}{head}\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def main(words: list[str]) -> int:
    if words not in ([], ["--check"]):
        print("usage: tools/configuration-page [--check]", file=sys.stderr)
        return 2
    status = 0
    for file, text in ((PAGE, page()), (SCHEMA, json_schema())):
        if not words:
            file.write_text(text)
        elif not file.exists() or file.read_text() != text:
            difference = "not what the schema says; run tools/configuration-page"
            print(f"{file}: {difference}", file=sys.stderr)
            status = 1
    return status


def json_schema() -> str:
    """The complete text of schema.json."""
    comments = _comments()

    def meaning(path: str, struct: type, name: str) -> str:
        keys = {key.name: key for key in _keys(struct)}
        return _meaning(path, struct, keys[name], comments) if name in keys else ""

    return configuration_schema.text(meaning)


def _comments() -> tuple[dict[str, str], dict[str, str]]:
    """The comments of the example, by dotted key, and of the schema, by "Struct.key"."""
    why: dict[str, str] = {}
    for file in sorted(Path(tables.__path__[0]).glob("*.py")):
        why |= _schema_comments(file.read_text())
    return _example_comments(EXAMPLE.read_text()), why


def _tables(struct: type, path: str = "") -> Iterator[tuple[str, type, bool]]:
    """(path, struct, whether it is a list of tables) of every table, parents first."""
    for each in types.type_info(struct).fields:  # type: ignore[attr-defined]
        name = f"{path}.{each.name}" if path else each.name
        if isinstance(each.type, types.StructType):
            yield name, each.type.cls, False
            yield from _tables(each.type.cls, name)
        elif isinstance(each.type, types.VarTupleType) and isinstance(
            each.type.item_type, types.StructType
        ):
            yield name, each.type.item_type.cls, True


def _keys(struct: type) -> list[types.Field]:
    fields = types.type_info(struct).fields  # type: ignore[attr-defined]
    return [each for each in fields if not _is_table(each.type)]


def _is_table(kind: types.Type) -> bool:
    """Whether the type is a table, or a list of tables with their own header."""
    if isinstance(kind, types.VarTupleType) and kind.min_length is None:
        kind = kind.item_type
    return isinstance(kind, types.StructType)


def _lead(struct: type, several: bool) -> str:
    """The purpose of the table, and whether it may be repeated."""
    doc = struct.__dict__.get("__doc__")
    lines = [" ".join(doc.split())] if doc else []
    if several:
        lines.append("One table for each; the file may have any number of them, or none.")
    return " ".join(lines) + "\n\n" if lines else ""


def _row(
    path: str, struct: type, key: types.Field, comments: tuple[dict[str, str], dict[str, str]]
) -> str:
    full = f"{path}.{key.name}"
    meaning = _meaning(path, struct, key, comments)
    flag = next((flag for flag, name in FLAGS.items() if name == full), "")
    if flag:
        meaning += f"; flag `{flag}`"
    cells = (f"`{key.name}`", _takes(struct, key), _shown(key), meaning)
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _meaning(
    path: str, struct: type, key: types.Field, comments: tuple[dict[str, str], dict[str, str]]
) -> str:
    meanings, why = comments
    meaning = meanings.get(f"{path}.{key.name}", "")
    if not _words(meaning) - _choices_of(key) - FILLERS:
        meaning = why.get(f"{struct.__name__}.{key.name}", meaning).removesuffix(".")
    return meaning


def _default(key: types.Field) -> Any:
    if key.default_factory is not msgspec.NODEFAULT:
        return key.default_factory()
    return key.default


def _shown(key: types.Field) -> str:
    """The default as written in the file."""
    default = _default(key)
    if default is msgspec.NODEFAULT:
        return "required"
    if _reader(key) is read_size:
        return f'`"{default // 2**20}MiB"`' if default % 2**20 == 0 else f"`{default}`"
    if isinstance(default, tuple):
        return f"`{json.dumps(default)}`"
    if isinstance(default, float) and default.is_integer():
        return f"`{int(default)}`"
    return f"`{to_toml_literal(default) if default != {} else '{}'}`"


def _reader(key: types.Field) -> object:
    extra = key.type.extra if isinstance(key.type, types.Metadata) else None
    return (extra or {}).get("read")


def _takes(struct: type, key: types.Field) -> str:
    reader = _reader(key)
    if reader in READ_AS:
        return READ_AS[reader]
    match key.type:
        case types.BoolType():
            return "true or false"
        case types.LiteralType():
            return _choices(struct, key.name)
        case types.IntType() | types.FloatType():
            unit = "seconds" if key.name.endswith("_secs") else "a number"
            kind = "a whole number" if isinstance(key.type, types.IntType) else unit
            return kind + _range(key.type)
        case types.UnionType(types=(of_values, other)):
            named = ", or a name" if isinstance(other, types.StrType) else ', or `"auto"`'
            return _takes_list(struct, key.name, of_values) + named
        case types.VarTupleType():
            return _takes_list(struct, key.name, key.type)
        case types.DictType():
            return "a table of strings"
        case types.StrType(min_length=1):
            return "a string, not empty"
        case types.StrType():
            return "a string"
    raise TypeError(f"{struct.__name__}.{key.name}: say here what {key.type} takes")


def _takes_list(struct: type, name: str, kind: types.Type) -> str:
    """The accepted values of a list, or of a number that may also be written as a word."""
    match kind:
        case types.IntType():
            return "a whole number" + _range(kind)
        case types.VarTupleType(item_type=types.StructType(cls=table)):
            return "a list of tables of " + ", ".join(f"`{each.name}`" for each in _keys(table))
        case types.VarTupleType(item_type=types.LiteralType()):
            return "a list of " + _choices(struct, name)
        case types.VarTupleType(min_length=least):
            return "a list of strings" + (", not empty" if least else "")
    raise TypeError(f"{struct.__name__}.{name}: say here what {kind} takes")


def _choices(struct: type, name: str) -> str:
    """The choices in the order of the schema; the type library would sort them."""
    hint = get_type_hints(struct)[name]
    choices = get_args(hint)
    if choices[-1] is Ellipsis:
        choices = get_args(choices[0])
    return ", ".join(f"`{each}`" for each in choices if each != "")


def _range(number: types.IntType | types.FloatType) -> str:
    low = f"above {number.gt:g}" if number.gt is not None else f"{number.ge:,}"
    if number.le is not None and number.le < SLIP:
        return f", {low} to {number.le:,}"
    return f", {low}" if number.gt is not None else f", {low} or more"


def _example_comments(text: str) -> dict[str, str]:
    """Dotted key -> its comment in the example; also for keys that are commented out."""
    found, table = {}, ""
    for line in text.splitlines():
        bare = line.removeprefix("# ")
        if header := re.match(r"\[\[?([\w.]+)\]\]?", bare):
            table = header[1]
        elif key := re.match(r"(\w+) = .*?\s# (?P<meaning>.+)", bare):
            found[f"{table}.{key[1]}"] = key["meaning"].removeprefix("not supported yet: ")
    return found


def _schema_comments(source: str) -> dict[str, str]:
    """ "Struct.key" -> the comment lines directly above it."""
    lines = source.splitlines()
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field in node.body:
            if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                continue
            above: list[str] = []
            at = field.lineno - 2
            while lines[at].lstrip().startswith("#"):
                above.insert(0, lines[at].strip().removeprefix("# "))
                at -= 1
            if above:
                found[f"{node.name}.{field.target.id}"] = " ".join(above)
    return found


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def _choices_of(key: types.Field) -> set[str]:
    if _reader(key) is read_policy:
        return set(POLICIES)
    return set(map(str, key.type.values)) if isinstance(key.type, types.LiteralType) else set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
