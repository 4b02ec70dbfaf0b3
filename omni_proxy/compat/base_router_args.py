"""Base of both classes of router arguments: construction, parser flags, effects of flags.

Contract: a trainer that uses sglang_router or vllm_router can use this package without a change. A
name that a class does not have is kept as an attribute, and the launcher logs it. Each flag of
these routers either sets a key, is refused, or has no effect, by the tables below. Arguments are
validated by `start_router`.
Source: `RouterArgs` of sglang-router 0.3.2 and vllm-router 0.1.17.
"""

from __future__ import annotations

import argparse
import dataclasses
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, Self

from omni_proxy.cli.flags import other_router_flags
from omni_proxy.config.configuration_flags import FLAG_ALIASES, FLAGS

# Fields whose flags have another name, and their destination in a namespace.
DESTINATIONS: Final = {
    "decode_urls": "decode",
    "prefill_urls": "prefill",
    "server_cert_path": "tls_cert_path",
    "server_key_path": "tls_key_path",
}
FLAG_NAMES: Final = {"wasm_middleware_routes": "wasm_middleware_route"}
WITHOUT_FLAG: Final = frozenset(("bootstrap_port_annotation",))
REPEATED: Final = frozenset(
    ("kv_event_source", "kv_event_replay_source", "pd_kv_events", "wasm_middleware_routes")
)
# Parser defaults of flags whose values are converted later.
UNREAD: Final[dict[str, object]] = {
    "prefill_urls": None, "decode_urls": None, "jwt_role_mapping": [],
}  # fmt: skip
NEVER_PREFIXED: Final = frozenset(("host", "port", "worker_urls"))
PREFIX: Final = "router-"


class RouterArgsBase:
    """Subclasses are dataclasses with `init=False`: their `__init__` is the one below."""

    dialect: ClassVar[typing.Literal["sglang", "vllm"]]
    # Defaults of flags that differ from the default of the field.
    flag_defaults: ClassVar[Mapping[str, object]] = {}

    def __init__(self, *values: object, **named: object) -> None:
        """Fields in their order or by name; other names are kept as attributes.

        Raises TypeError for too many values, or a field given twice.
        """
        fields = field_table(type(self))
        if len(values) > len(fields):
            raise TypeError(f"{len(values)} values, but there are {len(fields)} fields")
        by_place = dict(zip(fields, values, strict=False))
        if twice := by_place.keys() & named.keys():
            raise TypeError(f"passed by position and by keyword: {', '.join(sorted(twice))}")
        for name, field in fields.items():
            setattr(self, name, default_of(field))
        for name, value in (by_place | named).items():
            setattr(self, name, value)

    def unknown_fields(self) -> dict[str, object]:
        """The attributes that are not fields, by name."""
        fields = field_table(type(self))
        return {name: value for name, value in vars(self).items() if name not in fields}

    @classmethod
    def add_cli_args(
        cls,
        parser: argparse.ArgumentParser,
        use_router_prefix: bool = False,
        exclude_host_port: bool = False,
    ) -> None:
        """Add a flag for each field; the prefix is `--router-`, except for host, port and
        `--worker-urls`."""
        group = parser.add_argument_group("router (omni-proxy)")
        types = typing.get_type_hints(cls)
        for name, field in field_table(cls).items():
            if name in WITHOUT_FLAG or (exclude_host_port and name in ("host", "port")):
                continue
            prefix = PREFIX if use_router_prefix and name not in NEVER_PREFIXED else ""
            flag = flag_of(name)
            group.add_argument(
                "--" + prefix + flag.removeprefix("--"),
                dest=prefix.replace("-", "_") + DESTINATIONS.get(name, name),
                default=(UNREAD | dict(cls.flag_defaults)).get(name, default_of(field)),
                help=describe_flag(flag).replace("%", "%%"),
                **_argument(name, types[name]),
            )

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace, use_router_prefix: bool = False) -> Self:
        """The arguments from a namespace that `add_cli_args` filled, which may have others, too.

        With the prefix, a prefixed name that no class has is kept as an attribute. Raises
        ValueError that names the flag of a value that can't be read.
        """
        given = vars(args)
        prefix = PREFIX.replace("-", "_") if use_router_prefix else ""
        found: dict[str, object] = {}
        for name in field_table(cls):
            target = DESTINATIONS.get(name, name)
            for key in (prefix + target, target, prefix + name, name):
                if key in given:
                    found[name] = _read(name, given[key])
                    break
        return cls(**found, **(_further(cls, given, prefix) if prefix else {}))


def _further(
    cls: type[RouterArgsBase], given: Mapping[str, object], prefix: str
) -> dict[str, object]:
    """Prefixed attributes that are neither a flag of this class nor a default of the other one."""
    own = {DESTINATIONS.get(name, name) for name in field_table(cls)} | set(field_table(cls))
    usual: dict[str, list[object]] = {}
    for other in RouterArgsBase.__subclasses__():
        for name, field in field_table(other).items():
            known = usual.setdefault(DESTINATIONS.get(name, name), [])
            known += [default_of(field), other.flag_defaults.get(name), UNREAD.get(name)]
    names = (key.removeprefix(prefix) for key in given if key.startswith(prefix))
    return {
        name: given[prefix + name]
        for name in names
        if name not in own and given[prefix + name] not in (None, False, *usual.get(name, ()))
    }


def field_table(cls: type[RouterArgsBase]) -> dict[str, dataclasses.Field[Any]]:
    """The fields by name, in their order."""
    return {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]


def default_of(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def flag_of(name: str) -> str:
    """The flag of a field, without a prefix: `cache_threshold` is `--cache-threshold`."""
    flag = FLAG_NAMES.get(name) or DESTINATIONS.get(name, name)
    return "--" + flag.replace("_", "-")


def _argument(name: str, kind: object) -> dict[str, Any]:
    """The options of `add_argument` for a field."""
    if name == "prefill_urls":
        return {"nargs": "+", "action": "append", "metavar": "URL [PORT]"}
    if name == "decode_urls":
        return {"nargs": 1, "action": "append", "metavar": "URL"}
    if name in REPEATED:
        return {"action": "append", "metavar": "TEXT"}
    if kind is bool:
        return {"action": "store_true"}
    if "selector" in name:
        return {"nargs": "+", "type": str, "metavar": "KEY=VALUE"}
    scalar = next((each for each in (int, float) if each is kind or each in _parts(kind)), str)
    if list in _origins(kind) or dict in _origins(kind):
        item = float if "float" in str(kind) else str
        some = "+" if item is float else "*"
        return {"nargs": some, "type": item, "metavar": "VALUE"}
    return {"type": scalar, "metavar": {int: "N", float: "X"}.get(scalar, "TEXT")}


def _parts(kind: object) -> tuple[object, ...]:
    return typing.get_args(kind)


def _origins(kind: object) -> set[object]:
    """The origins of a type and its parts, such as `list` for `list[float] | None`."""
    return {typing.get_origin(each) for each in (kind, *_parts(kind))}


def _read(name: str, value: object) -> object:
    """The value in the form of the field; a converted value is returned unchanged. Raises
    ValueError."""
    flag = flag_of(name)
    if name == "prefill_urls":
        return [_prefill(each) for each in _items(value)]
    if name == "decode_urls":
        return [each[0] if isinstance(each, list) else each for each in _items(value)]
    if "selector" in name:
        return value if isinstance(value, dict) else dict(_pairs(flag, _items(value)))
    if name == "jwt_role_mapping":
        return value if isinstance(value, dict) else dict(_pairs(flag, _items(value)))
    if name == "control_plane_api_keys":
        return [_control_key(each) for each in _items(value)]
    return value


def _items(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def _prefill(words: object) -> object:
    """`(url, port)`; the port is None if there is none. Raises ValueError."""
    if isinstance(words, tuple):
        return words
    url, *more = words if isinstance(words, list) else [words]
    port = str(more[0]) if more else "none"
    if port.lower() == "none":
        return url, None
    if not port.isdigit():
        raise ValueError(f'--prefill {url}: "{port}" is not a port; write a number, or "none"')
    return url, int(port)


def _pairs(flag: str, texts: Iterable[str]) -> Iterable[tuple[str, str]]:
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f'{flag}: "{text}" has no "="; write KEY=VALUE')
        yield key, value


def _control_key(text: object) -> object:
    """`(id, name, key, role)` of `id:name:role:key`. Raises ValueError."""
    if not isinstance(text, str):
        return text
    parts = text.split(":", 3)
    if len(parts) != 4 or parts[2].lower() not in ("admin", "user"):
        raise ValueError(
            "--control-plane-api-keys: write id:name:role:key, where role is admin or user"
        )
    number, name, role, key = parts
    return number, name, key, role.lower()


# Flags of `launch-router` itself, with their help.
_OWN: Final = {
    "--worker-urls": "workers that already run",
    "--prefill": "a prefill worker, and its bootstrap port if any",
    "--decode": "a decode worker",
    "--pd-disaggregation": "prefill and decode workers are SGLang engines",
    "--vllm-pd-disaggregation": "prefill and decode workers are vLLM engines",
    "--kv-connector": "how vLLM engines pass KV caches: nixl or mooncake",
    "--service-discovery": "find pods of the proxy's cluster",
    "--selector": "labels of the pods",
    "--prefill-selector": "labels of pods with prefill workers",
    "--decode-selector": "labels of pods with decode workers",
    "--service-discovery-port": "port of the workers; annotations of the pods override it",
    "--service-discovery-namespace": "namespace of the pods (default: all)",
}
# Errors whose text differs between the command line and Python.
_REFUSED: Final = {
    "--backend": "workers may run any engine: list them in worker_urls",
    "--bootstrap-port-annotation": "the annotations omni-proxy.dev/bootstrap-port, "
    "sglang.ai/bootstrap-port and vllm.ai/bootstrap-port are read, and no others",
    "--ca-cert-paths": "set tls_worker_ca in [server] of a configuration file to one file, and "
    "start the proxy with the omni-proxy command",
}
_KEYS: Final[dict[str, str]] = {
    **FLAGS,
    **{name: FLAGS[flag] for flag, names in FLAG_ALIASES.items() for name in names},
    **other_router_flags.VALUED,
    **other_router_flags.LISTS,
    **other_router_flags.JOINED,
    **{flag: key for flag, (key, _) in other_router_flags.SWITCHES.items()},
}


def has_effect(flag: str) -> bool:
    """Whether the flag sets something."""
    return flag in _OWN or flag in _KEYS


def refusal_of(flag: str) -> str:
    """Why the flag is refused, and the alternative; "" if it is not refused."""
    return _REFUSED.get(flag) or other_router_flags.explain_missing_flag(flag)


def describe_flag(flag: str) -> str:
    """One line for a parser's help."""
    if has_effect(flag):
        return _OWN.get(flag) or f"sets {_KEYS[flag]}"
    if why := refusal_of(flag):
        return f"not served: {why}"
    if flag in other_router_flags.WITHOUT_EFFECT:
        return f"no effect: {other_router_flags.WITHOUT_EFFECT[flag][0]}"
    return "no effect here"
