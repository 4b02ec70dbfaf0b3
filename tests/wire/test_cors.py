import pytest

from omni_proxy.wire.cors import Cors, drop_cors_fields, encode_fields

PAGE = "https://app.example"


def test_any_origin_is_allowed_without_credentials():
    fields = dict(Cors(["*"]).fields(PAGE))
    assert fields["access-control-allow-origin"] == "*"
    assert "access-control-allow-credentials" not in fields
    assert {"x-request-id", "x-omni-attempts", "retry-after"} <= set(
        fields["access-control-expose-headers"].split(", ")
    )


def test_a_listed_origin_is_named_and_the_response_varies_by_it():
    fields = dict(Cors([PAGE], ["X-My-Id"]).fields(PAGE))
    assert fields["access-control-allow-origin"] == PAGE
    assert fields["vary"] == "Origin"
    assert "x-my-id" in fields["access-control-expose-headers"]


@pytest.mark.parametrize("origins", [[], [PAGE]])
@pytest.mark.parametrize("origin", ["http://app.example", "null", f"{PAGE}:444", f"{PAGE}.evil"])
def test_another_origin_gets_no_fields(origins, origin):
    cors = Cors(origins)
    assert cors.fields(origin) == cors.preflight(origin, ["POST"], None) == ()
    assert cors.lines(origin.encode()) == b""


def test_a_preflight_allows_the_methods_and_requested_fields():
    fields = dict(Cors(["*"]).preflight(PAGE, {"POST"}, "authorization, content-type"))
    assert fields["access-control-allow-methods"] == "POST"
    assert fields["access-control-allow-headers"] == "authorization, content-type"
    assert "access-control-allow-headers" not in dict(Cors(["*"]).preflight(PAGE, ["POST"], "a:b"))


def test_lines_are_the_encoded_fields():
    for cors in (Cors(["*"]), Cors([PAGE])):
        assert cors.lines(PAGE.encode()) == encode_fields(cors.fields(PAGE))


def test_only_a_workers_own_cors_fields_are_dropped():
    lines = (
        b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: x\r\na: access-control-b: c\r\n"
        b"access-control-allow-credentials: true\r\nvary: Origin\r\n"
    )
    kept = b"HTTP/1.1 200 OK\r\na: access-control-b: c\r\nvary: Origin\r\n"
    assert drop_cors_fields(lines) == kept
