"""Validates parsed tables against the schema, and finds all problems in one run.

`walk` checks each key: it returns the table with normalized values and without invalid parts, which
converts into the struct if and only if no problem was found. `check_rules` checks rules between
keys (duplicate URLs, incomplete pairs, contradictions) on tables that `walk` returned: parts may be
missing, but the present ones have the right types.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

from msgspec import NODEFAULT, Struct, inspect

from omni_proxy.config.problem import Path, did_you_mean, format_path, to_toml_literal
from omni_proxy.config.schema import LaunchEntry
from omni_proxy.config.tables.cluster import cluster_findings
from omni_proxy.config.tables.discover import discover_findings
from omni_proxy.config.tables.keys import source_findings, unknown_key_hint
from omni_proxy.shared.engine_protocol import DEFAULT_BOOTSTRAP_PORT
from omni_proxy.shared.origins import MAX_PORT

# Path, reason, hint.
Finding: TypeAlias = tuple[Path, str, str]

WRONG: Final = object()


@cache
def type_of(struct: type[Struct]) -> inspect.StructType:
    """The types of all keys, which msgspec takes milliseconds to collect."""
    kind = inspect.type_info(struct)
    assert isinstance(kind, inspect.StructType)
    return kind


def walk(table: object, struct: type[Struct]) -> tuple[dict[str, Any], list[Finding]]:
    walker = _Walker()
    values = walker.read(table, type_of(struct), ())
    return ({} if values is WRONG else values), walker.findings


class _Walker:
    def __init__(self) -> None:
        self.findings: list[Finding] = []

    def read(self, value: object, kind: inspect.Type, path: Path) -> Any:
        match kind:
            case inspect.Metadata():
                return self._read_value(value, kind, path)
            case inspect.UnionType(types=(only, inspect.NoneType())):
                return self.read(value, only, path)
            case inspect.UnionType(types=(of_values, inspect.LiteralType(values=words))):
                return self._or_word(value, of_values, words, path)
            case inspect.UnionType(types=(number, text)):
                return self.read(value, text if isinstance(value, str) else number, path)
            case inspect.StructType():
                return self._struct(value, kind, path)
            case inspect.DictType():
                return self._dict(value, kind, path)
            case inspect.VarTupleType():
                return self._list(value, kind, path)
            case inspect.LiteralType():
                return self._choice(value, kind.values, path)
            case _:
                return self._plain(value, kind, path)

    def _wrong(self, path: Path, reason: str, hint: str = "") -> Any:
        self.findings.append((path, reason, hint))
        return WRONG

    def _read_value(self, value: object, kind: inspect.Metadata, path: Path) -> Any:
        reader: Callable[[object], object] | None = (kind.extra or {}).get("read")
        if reader:
            try:
                value = reader(value)
            except ValueError as error:
                return self._wrong(path, *map(str, error.args))
        return self.read(value, kind.type, path)

    def _struct(self, value: object, kind: inspect.StructType, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._wrong(path, f"expected a table, got {_named(value)}")
        fields = {field.name: field for field in kind.fields}
        values = {}
        for key, inner in value.items():
            if key not in fields:
                hint = unknown_key_hint(kind.cls, key) or did_you_mean(key, fields)
                self._wrong((*path, key), "unknown key", hint)
                continue
            read = self.read(inner, fields[key].type, (*path, key))
            if read is not WRONG:
                values[key] = read
        for name, field in fields.items():
            required = field.default is NODEFAULT and field.default_factory is NODEFAULT
            if required and name not in value:
                self._wrong((*path, name), "is missing")
        return values

    def _dict(self, value: object, kind: inspect.DictType, path: Path) -> Any:
        if not isinstance(value, dict):
            return self._wrong(path, f"expected a table, got {_named(value)}")
        values = {k: self.read(v, kind.value_type, (*path, k)) for k, v in value.items()}
        return {k: v for k, v in values.items() if v is not WRONG}

    def _list(self, value: object, kind: inspect.VarTupleType, path: Path) -> Any:
        tables = isinstance(kind.item_type, inspect.StructType)
        if not isinstance(value, list | tuple):
            hint = f"write [[{format_path(path)}]]" if tables else "write it in [ ]"
            return self._wrong(path, f"expected a list, got {_named(value)}", hint)
        if len(value) < (kind.min_length or 0):
            return self._wrong(path, "must not be empty")
        values = [self.read(v, kind.item_type, (*path, i)) for i, v in enumerate(value)]
        # An invalid table becomes an empty one, so that the others keep their index.
        return [{} if v is WRONG and tables else v for v in values if tables or v is not WRONG]

    def _choice(self, value: object, choices: Sequence[object], path: Path) -> Any:
        # In TOML, unlike Python, 1.0 and true are not equal to 1.
        if any(type(value) is type(choice) and value == choice for choice in choices):
            return value
        quoted = [str(choice) for choice in choices]
        hint = did_you_mean(value, quoted) if isinstance(value, str) else ""
        shown = ", ".join(choice or '""' for choice in quoted)
        reason = f"{to_toml_literal(value)} is not one of {shown}"
        return self._wrong(path, reason, hint)

    def _or_word(
        self, value: object, kind: inspect.Type, words: Sequence[object], path: Path
    ) -> Any:
        """A value of `kind`, or one of `words` instead."""
        if value in words:
            return value
        if isinstance(value, str):
            expected = "a list" if isinstance(kind, inspect.VarTupleType) else _PLAIN[type(kind)][1]
            quoted = " or ".join(map(to_toml_literal, words))
            return self._wrong(
                path, f"expected {expected} or {quoted}, got {to_toml_literal(value)}"
            )
        return self.read(value, kind, path)

    def _plain(self, value: Any, kind: inspect.Type, path: Path) -> Any:
        allowed, expected = _PLAIN[type(kind)]
        # TOML distinguishes true from 1; in Python a bool is an int.
        if not isinstance(value, allowed) or isinstance(value, bool) != (allowed is bool):
            return self._wrong(path, f"expected {expected}, got {_named(value)}")
        reason = _out_of_range(value, kind)
        if reason:
            return self._wrong(path, reason)
        return float(value) if isinstance(kind, inspect.FloatType) else value


_PLAIN: Final[dict[type[inspect.Type], tuple[Any, str]]] = {
    inspect.BoolType: (bool, "true or false"),
    inspect.IntType: (int, "a whole number"),
    inspect.FloatType: ((int, float), "a number"),
    inspect.StrType: (str, "a string"),
}


def _out_of_range(value: Any, kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StrType):
        if "\0" in value:
            # Not possible in any path, command, environment variable or header.
            return "must not contain a NUL character"
        return "must not be empty" if len(value) < (kind.min_length or 0) else ""
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        # Written as `not (valid)`: NaN fails every comparison.
        if kind.ge is not None and not value >= kind.ge:
            return f"must be at least {kind.ge}, got {value}"
        if kind.gt is not None and not value > kind.gt:
            return f"must be above {kind.gt}, got {value}"
        if kind.le is not None and not value <= kind.le:
            return f"must be at most {kind.le}, got {value}"
    return ""


def _named(value: object) -> str:
    match value:
        case bool():
            return "a boolean"
        case int():
            return "a whole number"
        case float():
            return "a number with a fraction"
        case str():
            return "a string"
        case list():
            return "a list"
        case dict():
            return "a table"
        case _:
            return "a date or time"


API_KEY_NAME: Final = "api_key"
KV_EVENTS_MODULE: Final = "zmq"
KV_EVENTS_INSTALL: Final = "pip install 'omni-proxy[kv-events]'"
VOICE_CAPABILITIES = ("speech", "audio_input")


def check_rules(tables: Mapping[str, Any]) -> Iterator[Finding]:
    launch = tables.get("launch", [])
    yield from _incomplete_pairs(tables.get("server", {}))
    yield from _incomplete_picker_tls(tables)
    yield from _tls_without_effect(tables)
    yield from _failure_policy_without_store(tables.get("weight_sync", {}))
    for index, entry in enumerate(launch):
        yield from _launch_problems(entry, ("launch", index))
        yield from _role_problems(entry, ("launch", index))
        yield from _kv_event_problems(entry, ("launch", index))
    yield from _duplicates(_launch_names(launch), "group name")
    yield from _duplicates(_worker_urls(tables.get("workers", []), launch), "worker URL")
    yield from _duplicates(_paths(tables), "route")
    yield from _voice_owner_capabilities(tables)
    for index, entry in enumerate(tables.get("workers", [])):
        yield from _role_problems(entry, ("workers", index))
        yield from _kv_event_problems(entry, ("workers", index))
    yield from _admin_key_problems(tables.get("admin", {}).get("keys", []))
    aliases = tables.get("routing", {}).get("models", [])
    yield from _duplicates(_alias_names(aliases), "alias")
    for index, alias in enumerate(aliases):
        yield from _duplicates(_alias_targets(alias, index), "target")
    yield from _aliases_of_aliases(aliases)
    yield from source_findings(tables.get("keys", []), ("keys",))
    yield from discover_findings(tables.get("discover", []), ("discover",))
    yield from cluster_findings(tables.get("cluster", {}))


def _role_problems(entry: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    """Keys without effect for the worker's role: an error, because the author expects an effect."""
    role, connector = entry.get("role"), entry.get("kv_connector")
    if role == "regular" and connector:
        reason = "is for prefill and decode workers only"
        yield (*path, "kv_connector"), reason, 'set role to "prefill" or "decode"'
    if role in ("regular", "decode") and "bootstrap_port" in entry:
        if entry["bootstrap_port"] != DEFAULT_BOOTSTRAP_PORT:
            yield (*path, "bootstrap_port"), "is for prefill workers only", ""
    elif connector == "nixl" and entry.get("bootstrap_port", 0) not in (0, DEFAULT_BOOTSTRAP_PORT):
        reason = "has no effect with nixl, whose prefill response names the port"
        yield (*path, "bootstrap_port"), reason, "drop it"


def _admin_key_problems(entries: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    path: Path = ("admin", "keys")
    yield from source_findings(entries, path)
    for index, entry in enumerate(entries):
        if entry.get("name") == API_KEY_NAME:
            reason = f'"{API_KEY_NAME}" is the name of [admin] api_key in the audit log'
            yield (*path, index, "name"), reason, "choose another name"


def _kv_event_problems(entry: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    events = entry.get("kv_events", "off")
    if events != "off" and find_spec(KV_EVENTS_MODULE) is None:
        reason = "needs ZeroMQ for Python (pyzmq), which is not installed"
        yield (*path, "kv_events"), reason, KV_EVENTS_INSTALL
    if events == "off" and entry.get("kv_replay"):
        yield (*path, "kv_replay"), "has no effect without kv_events", "name the publisher, too"


def _alias_names(aliases: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Path, str]]:
    for index, alias in enumerate(aliases):
        if "name" in alias:
            yield ("routing", "models", index, "name"), alias["name"]


def _alias_targets(alias: Mapping[str, Any], index: int) -> Iterator[tuple[Path, str]]:
    for number, target in enumerate(alias.get("targets", [])):
        if "model" in target:
            yield ("routing", "models", index, "targets", number, "model"), target["model"]


def _aliases_of_aliases(aliases: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Targets that are other aliases. An alias may name itself: that is the model of that name."""
    names = {name for _, name in _alias_names(aliases)}
    for index, alias in enumerate(aliases):
        for path, model in _alias_targets(alias, index):
            if model in names and model != alias.get("name"):
                reason = f'"{model}" is an alias itself; targets are models of workers'
                yield path, reason, "name the targets of that alias"


def _voice_owner_capabilities(tables: Mapping[str, Any]) -> Iterator[Finding]:
    owner = tables.get("routing", {}).get("voice_owner")
    for entry in tables.get("workers", []):
        if owner and entry.get("url") == owner and "capabilities" in entry:
            missing = [name for name in VOICE_CAPABILITIES if name not in entry["capabilities"]]
            if missing:
                reason = f"{owner} lacks {' and '.join(missing)}, required for keeping voices"
                yield ("routing", "voice_owner"), reason, "add that to its capabilities"


def _incomplete_pairs(server: Mapping[str, Any]) -> Iterator[Finding]:
    for key, counterpart in (("tls_cert", "tls_key"), ("tls_key", "tls_cert")):
        if server.get(key) and not server.get(counterpart):
            yield ("server", key), f"needs {counterpart}, too", ""


def _incomplete_picker_tls(tables: Mapping[str, Any]) -> Iterator[Finding]:
    picker = tables.get("picker", {})
    cert, key, authorities = "grpc_tls_cert", "grpc_tls_key", "grpc_tls_client_ca"
    for name, counterpart in ((cert, key), (key, cert), (authorities, cert)):
        if picker.get(name) and not picker.get(counterpart):
            yield ("picker", name), f"needs {counterpart}, too", ""


def _tls_without_effect(tables: Mapping[str, Any]) -> Iterator[Finding]:
    """TLS keys without effect: an error, because the author expects protection."""
    server = tables.get("server", {})
    if server.get("tls_cert") and server.get("host", "").startswith("unix:"):
        yield ("server", "tls_cert"), "a Unix socket does not use TLS", "listen on a port"
    if server.get("tls_client_ca") and not server.get("tls_cert"):
        yield ("server", "tls_client_ca"), "needs tls_cert and tls_key, too", ""
    for index, entry in enumerate(tables.get("workers", [])):
        path = ("workers", index)
        unverified = entry.get("tls_verify") is False
        key = "tls_ca" if entry.get("tls_ca") else "tls_verify" if unverified else ""
        if key and not entry.get("url", "https").startswith("https"):
            yield (*path, key), "is for https workers only", "write its url with https://"
        elif entry.get("tls_ca") and unverified:
            yield (*path, "tls_verify"), "is off, so tls_ca has no effect", "drop one of them"


def _failure_policy_without_store(sync: Mapping[str, Any]) -> Iterator[Finding]:
    policy = sync.get("on_failure", "quarantine")
    if policy != "quarantine" and sync.get("mode") not in ("receive", "both"):
        reason = f'"{policy}" needs stored versions'
        yield ("weight_sync", "on_failure"), reason, 'set weight_sync.mode to "receive" or "both"'


def _launch_problems(entry: Mapping[str, Any], path: Path) -> Iterator[Finding]:
    if entry.get("command") and not entry["command"][0].strip():
        yield (*path, "command"), "has no program", ""
    for name in entry.get("env", {}):
        if not name or "=" in name:
            yield (*path, "env", name), "is not the name of an environment variable", ""
    group = _group(entry)
    last = group.base_port + group.replicas - 1
    if last > MAX_PORT:
        yield (*path, "base_port"), f"the last replica would need port {last}", ""
    elif group.base_bootstrap_port + group.replicas - 1 > MAX_PORT:
        last = group.base_bootstrap_port + group.replicas - 1
        reason = f"the last replica would need bootstrap port {last}"
        yield (*path, "base_bootstrap_port"), reason, ""
    else:
        try:
            _ = group.urls
        except ValueError as error:
            yield (*path, "host"), str(error), ""


def _group(entry: Mapping[str, Any]) -> LaunchEntry:
    keys = ("host", "base_port", "base_bootstrap_port", "replicas")
    group_keys = {key: entry[key] for key in keys if key in entry}
    return LaunchEntry(command=(), **group_keys)


def _launch_names(launch: list[Mapping[str, Any]]) -> Iterator[tuple[Path, str]]:
    default = LaunchEntry(command=()).name
    for index, entry in enumerate(launch):
        yield ("launch", index, "name"), entry.get("name", default)


def _worker_urls(
    workers: list[Mapping[str, Any]], launch: list[Mapping[str, Any]]
) -> Iterator[tuple[Path, str]]:
    for index, entry in enumerate(workers):
        if "url" in entry:
            yield ("workers", index, "url"), entry["url"]
    for index, entry in enumerate(launch):
        path: Path = ("launch", index)
        if not any(_launch_problems(entry, path)):
            for url in _group(entry).urls:
                yield (*path, "base_port"), url


def _paths(tables: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    for table in ("routes", "control_routes"):
        for index, entry in enumerate(tables.get(table, [])):
            if "path" in entry:
                yield (table, index, "path"), entry["path"]


def _duplicates(entries: Iterator[tuple[Path, str]], noun: str) -> Iterator[Finding]:
    first: dict[str, Path] = {}
    for path, text in entries:
        if text in first:
            yield path, f"duplicate {noun} {text}", f"{format_path(first[text])} has it already"
        first.setdefault(text, path)
