import pytest
from quart import Quart

from omni_proxy.shared.asgi.url_rules import match_only


@pytest.fixture
def routes():
    app = Quart(__name__)
    match_only(app)
    app.add_url_rule("/workers/<path:name>", "worker", methods=["GET"])
    return app.url_map.bind("host")


def test_routes_are_matched(routes):
    assert routes.match("/workers/a/b", method="GET") == ("worker", {"name": "a/b"})
    assert set(routes.allowed_methods("/workers/a")) == {"GET", "HEAD", "OPTIONS"}


def test_building_a_url_is_an_error(routes):
    with pytest.raises(NotImplementedError, match="/workers/"):
        routes.build("worker", {"name": "a"})
