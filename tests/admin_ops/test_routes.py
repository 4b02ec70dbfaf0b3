import re

import pytest

from omni_proxy.admin_api.routes.broadcast_routes import CONFIGURED
from omni_proxy.admin_ops.routes import is_known
from tests.admin_api.api_fixture import A, build_api, entry


def test_every_route_of_the_front_is_known():
    rules = [rule.rule for rule in build_api(entry(A)).app.url_map.iter_rules()]
    assert len(rules) > 40
    for rule in set(rules) - {CONFIGURED}:
        assert is_known(re.sub("<[^>]*>", "x/y", rule)), rule


@pytest.mark.parametrize(
    "path", ["/", "", "/nowhere", "/workers2", "/v1/rl", "/v1/rl/enginex", "/live/x", "//nowhere"]
)
def test_what_the_front_has_no_route_for_is_not(path):
    api = build_api(entry(A))
    assert not api.app.url_map.bind("").test(path)
    assert not is_known(path)
