import re

import pytest

from omni_proxy.admin_api.routes.operations.weight_routes import CONFIGURED
from omni_proxy.admin_ops.admin_route_table import (
    Kind,
    check_routes,
    control_route,
    is_built_in,
    is_known,
)
from omni_proxy.config.parse import ConfigError, parse
from tests.admin_api.api_fixture import A, build_api, entry


def test_every_route_of_the_admin_api_is_built_in():
    rules = [rule.rule for rule in build_api(entry(A)).app.url_map.iter_rules()]
    assert len(rules) > 40
    for rule in set(rules) - {CONFIGURED}:
        assert is_built_in(re.sub("<[^>]*>", "x/y", rule)), rule


@pytest.mark.parametrize(
    "path", ["/", "", "/nowhere", "/workers2", "/v1/rl", "/v1/rl/enginex", "/live/x", "//nowhere"]
)
def test_a_path_without_a_route_is_not_built_in(path):
    api = build_api(entry(A))
    assert not api.app.url_map.bind("").test(path)
    assert not is_built_in(path)


CONTROL = '[[control_routes]]\npath = "{}"\nkind = "{}"\n'


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.FLUSH])
def test_a_configured_control_route_has_its_kind(kind):
    config = parse(CONTROL.format("/init_broadcaster", kind.value))
    route = control_route(config, "/init_broadcaster")
    assert (route.kind, "GET" in route.methods) == (kind, kind is Kind.READ)
    assert is_known("/init_broadcaster", config)
    assert control_route(config, "/init_broadcaster/x") is None
    assert not is_known("/init", config)


@pytest.mark.parametrize(
    "path",
    ["/workers", "/workers/x", "/pause_generation", "/abort_request", "/config", "/generate",
     "/v1/responses/x", "/v1/audio/speech/stream", "/v1/rl/engine/x"],
)  # fmt: skip
@pytest.mark.parametrize("table", ["routes", "control_routes"])
def test_a_built_in_route_cannot_be_configured(path, table):
    kind_line = '\nkind = "plain"' if table == "control_routes" else ""
    config = parse(f'[[{table}]]\npath = "{path}"{kind_line}')
    with pytest.raises(ConfigError, match="built-in") as refused:
        check_routes(config, "proxy.toml")
    assert f"{table}[0].path" in str(refused.value)


def test_a_path_can_be_configured_only_once():
    with pytest.raises(ConfigError, match="duplicate route /x"):
        parse('[[routes]]\npath = "/x"\n' + CONTROL.format("/x", "plain"))


def test_a_control_route_requires_a_kind():
    with pytest.raises(ConfigError, match="kind"):
        parse('[[control_routes]]\npath = "/x"\n')
