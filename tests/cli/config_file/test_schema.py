"""The schema accepts what the program accepts, and refuses the same types and ranges."""

import json
import tomllib

import jsonschema_rs
import pytest

from omni_proxy.cli import main
from omni_proxy.cli.config_file.schema import schema_text
from omni_proxy.config.parse import ConfigError, parse
from tests.config.test_example import TEXT, WHOLE

VALIDATOR = jsonschema_rs.Draft7Validator(json.loads(schema_text()))
GOOD = """
[server]
port = 0
max_payload_size = "1.5 GiB"
overload_status = 429
tls_cert = ""
[server.timeouts]
connect_secs = 1
[routing]
policy = "package.module:Class"
session_body_keys = ["a.b"]
[[workers]]
url = "unix:/run/w.sock"
ranks = "auto"
loras = ["a"]
[[launch]]
command = ["x"]
env = { A = "1" }
[[admin.keys]]
name = "a"
key_env = "A"
"""
BAD = """
[sever]
[server] prot = 1
[server] port = 70000
[server] port = "1"
[server] overload_status = 500
[server] max_payload_size = "64 miles"
[server] max_payload_size = 0
[server] unix_mode = "rw"
[server] access_log = ""
[server.timeouts] connect_secs = -1
[health] interval_secs = 0
[health] endpoint = "health"
[health] on_threshold = "gone"
[routing] policy = ""
[routing] retry_on = ["never"]
[[workers]] disabled = true
[[workers]] url = "http://a" ranks = "some"
[[launch]] command = []
[[admin.keys]] key_env = "A"
[[admin.keys]] name = "a" key_sha256 = "12"
"""


def as_toml(line):
    """Break a line "[table] key = value key = value" into lines of TOML."""
    text = line.replace("] ", "]\n", 1)
    return text.replace('" ', '"\n')


@pytest.mark.parametrize("text", [TEXT, WHOLE, GOOD, ""], ids=["example", "whole", "good", "empty"])
def test_a_file_that_the_program_accepts_is_valid(text):
    parse(text)
    assert [error.message for error in VALIDATOR.iter_errors(tomllib.loads(text))] == []


@pytest.mark.parametrize("line", BAD.strip().splitlines())
def test_a_file_that_the_program_refuses_is_invalid(line):
    text = as_toml(line)
    with pytest.raises(ConfigError):
        parse(text)
    assert not VALIDATOR.is_valid(tomllib.loads(text))


def test_keys_have_descriptions_defaults_and_choices_for_editors():
    server = json.loads(schema_text())["properties"]["server"]["properties"]
    assert "port to listen on" in server["port"]["description"]
    assert server["port"]["default"] == 30000
    assert server["half_close"]["enum"] == ["abort", "answer"]


def test_the_command_prints_the_schema(capsys):
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == schema_text()
