import string

import pytest
from hypothesis import strategies as st
from msgspec import inspect

from omni_proxy.config.fields import CAPABILITIES, POLICIES
from omni_proxy.config.schema import (
    AdminKey,
    AliasTarget,
    Config,
    ControlRouteEntry,
    LaunchEntry,
    ModelAlias,
    RouteEntry,
    WorkerEntry,
)
from omni_proxy.config.tables.discover import DiscoverEntry
from omni_proxy.config.tables.keys import CallerKey

WORDS = st.text(string.ascii_letters + string.digits + "-_ #\"'\\\n[]{}é", max_size=12)
NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}", fullmatch=True)
ADDRESSES = st.sampled_from(["", "unix:/run/admin.sock"]) | NAMES.map(lambda name: f"{name}:80")
STRATEGIES = {
    "server.host": NAMES | st.just("unix:/run/proxy.sock"),
    "server.unix_mode": st.from_regex(r"0[0-7]{3}", fullmatch=True),
    "server.tls_cert": st.just(""),  # needs other keys
    "server.tls_key": st.just(""),
    "server.tls_client_ca": st.just(""),
    "admin.listen": ADDRESSES,
    "admin.metrics_listen": ADDRESSES,
    **dict.fromkeys(
        ("server.access_log", "server.route_log", "server.log_file", "admin.audit_log"),
        st.sampled_from(["off", "-", "access.log", "/dev/stderr"]),
    ),
    "server.cors_allow_origins": st.sampled_from([(), ("*",), ("https://a.test", "tauri://b:1")]),
    "admin.allowed_hosts": st.sampled_from([(), ("a",), ("proxy.internal", "b_c")]),
    "server.request_id_headers": st.sampled_from([(), ("x-session-id",), ("X-A", "x-b")]),
    "observe.otlp_endpoint": st.sampled_from(["", "http://c:4318", "https://c/otlp"]),
    "picker.grpc_listen": ADDRESSES,
    "picker.grpc_tls_cert": st.just(""),  # needs other keys
    "picker.grpc_tls_key": st.just(""),
    "picker.grpc_tls_client_ca": st.just(""),
    "cluster.url": st.sampled_from(["", "redis://a", "rediss://u:p@b:7000/3"]),
    "cluster.url_env": st.just(""),  # is an alternative to the URL
    "cluster.password_file": st.just(""),  # needs one of them
    "cluster.name": NAMES,
    "cluster.node": st.just("") | NAMES,
    "cluster.publish_secs": st.floats(0.005, 0.1),
    "server.request_id_header": st.sampled_from(["", "x-request-id", "X-Trace"]),
    "weight_sync.on_failure": st.just("quarantine"),  # the others need a mode
    "routing.policy": st.sampled_from([*POLICIES, "package.module:Class"]),
    "routing.disaggregation.prefill_policy": st.sampled_from(["", *POLICIES]),
    "routing.disaggregation.decode_policy": st.sampled_from(["", *POLICIES]),
    "routing.models": st.lists(
        st.builds(
            ModelAlias,
            name=NAMES,
            targets=NAMES.map(lambda model: (AliasTarget(model=f"M-{model}", weight=2),)),
            rewrite=st.booleans(),
        ),
        unique_by=lambda alias: alias.name,
        max_size=3,
    ).map(tuple),
    "routing.ranks": st.sampled_from([1, 4, "auto"]),
    "routing.voice_owner": st.just("") | NAMES.map(lambda name: f"http://{name}.voices:80"),
    "admin.keys": st.lists(
        st.builds(AdminKey, name=NAMES, key_file=NAMES, role=st.sampled_from(["read", "all"])),
        unique_by=lambda key: key.name,
        max_size=2,
    ).map(tuple),
    "keys": st.lists(
        st.builds(
            CallerKey,
            name=NAMES,
            key_env=NAMES.map(lambda name: name.replace("-", "_")),
            models=st.sampled_from([(), ("m", "n")]),
            max_inflight=st.integers(0, 9),
            priority=st.integers(-3, 3),
        ),
        unique_by=lambda key: key.name,
        max_size=3,
    ).map(tuple),
    "discover": st.lists(
        st.builds(
            DiscoverEntry,
            name=NAMES,
            namespace=NAMES,
            selector=st.sampled_from(["app=a", "tier in (a, b),!draft", ""]),
            port=st.integers(1, 65535) | NAMES,
            role=st.sampled_from(["", "prefill"]),
            model_label=st.sampled_from(["", "omni.dev/model"]),
            api_server=st.sampled_from(["", "https://k8s.internal:6443"]),
            token_file=WORDS,
            capabilities=st.sets(st.sampled_from(CAPABILITIES), min_size=1).map(tuple),
        )
        | st.builds(
            DiscoverEntry,
            name=NAMES,
            kind=st.just("dns"),
            dns_name=st.sampled_from(["_http._tcp.a.svc", "engines.internal"]),
            dns_server=st.sampled_from(["", "127.0.0.1:53"]),
            refresh_secs=st.floats(0.5, 60),
        ),
        unique_by=lambda entry: entry.name,
        max_size=3,
    ).map(tuple),
    "health.endpoint": st.just("/health") | NAMES.map(lambda name: f"/{name}"),
}


def values(kind, key):
    if key in STRATEGIES:
        return STRATEGIES[key]
    if isinstance(kind, inspect.Metadata):
        return values(kind.type, key)
    match kind:
        case inspect.StructType():
            return structs(kind.cls, key + ".")
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type, key), unique=True).map(tuple)
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType() | inspect.FloatType():
            return numbers(kind)
        case inspect.StrType():
            return NAMES if kind.min_length else WORDS
    raise AssertionError(f"no strategy for {kind} at {key}")


def numbers(kind):
    if isinstance(kind, inspect.IntType):
        return st.integers(kind.ge, kind.le)
    low = kind.gt if kind.ge is None else kind.ge
    return st.floats(low, kind.le, exclude_min=kind.ge is None)


def structs(cls, prefix=""):
    fields = inspect.type_info(cls).fields
    return st.builds(cls, **{f.name: values(f.type, prefix + f.name) for f in fields})


CAPABLE = st.sets(st.sampled_from(CAPABILITIES), min_size=1).map(tuple)
WORKERS = st.builds(
    WorkerEntry,
    url=NAMES.map(lambda host: f"http://{host}:80"),
    model=WORDS,
    capabilities=CAPABLE,
    disabled=st.booleans(),
    max_inflight=st.integers(0, 9),
    role=st.sampled_from(["", "prefill", "decode"]),
    kv_connector=st.sampled_from(["", "sglang", "mooncake"]),
    ranks=st.sampled_from([0, 1, 8, "auto"]),
    loras=st.sampled_from([(), ("l", "k"), "auto"]),
    kv_events=st.sampled_from(["auto", "tcp://10.0.0.1:5557"]),
    kv_replay=st.sampled_from(["", "tcp://*:5558"]),
)
GROUPS = st.builds(
    LaunchEntry,
    name=NAMES,
    command=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    replicas=st.integers(0, 3),
    base_port=st.integers(1, 60000).map(lambda port: port - port % 3 + 3),
    base_bootstrap_port=st.integers(1, 60000),
    kv_events=st.sampled_from(["off", "auto"]),
    capabilities=CAPABLE,
    env=st.dictionaries(NAMES, WORDS, max_size=2),
)


@pytest.fixture(scope="session")
def configs():
    """A strategy for every valid configuration."""
    tables = {
        field.name: values(field.type, field.name)
        for field in inspect.type_info(Config).fields
        if field.name not in {"workers", "launch", "routes", "control_routes"}
    }
    paths = st.lists(NAMES.map("/{}".format), max_size=4, unique=True)
    routes = paths.map(lambda drawn: tuple(RouteEntry(path=f"/a{path}") for path in drawn))
    kinds = st.sampled_from(["read", "plain", "pause", "continue", "group", "update"])
    control = st.builds(
        lambda drawn, kind: tuple(ControlRouteEntry(path=path, kind=kind) for path in drawn),
        paths, kinds,
    )  # fmt: skip
    workers = st.lists(WORKERS, max_size=3, unique_by=lambda entry: entry.url)
    groups = st.lists(
        GROUPS, max_size=2, unique_by=(lambda entry: entry.name, lambda entry: entry.base_port)
    )
    return st.builds(
        Config, **tables, workers=workers.map(tuple), launch=groups.map(tuple), routes=routes,
        control_routes=control,
    )  # fmt: skip


@pytest.fixture(scope="session")
def worker_entries():
    return WORKERS
