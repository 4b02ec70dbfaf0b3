import pytest

from omni_proxy.config.tables.keys import KeySource, source_findings
from omni_proxy.config.validate import walk

HEX = "ab" * 32


def findings_of(*tables):
    walked = [walk(table, KeySource) for table in tables]
    findings = [finding for _, row in walked for finding in row]
    return findings + list(source_findings([values for values, _ in walked], ("keys",)))


@pytest.mark.parametrize("name", ["key_env", "key_file"])
def test_a_name_and_one_source_are_accepted(name):
    assert findings_of({"name": "team-a", name: "TEAM_A"}) == []


def test_a_hash_is_accepted_in_either_case():
    values, findings = walk({"name": "a", "key_sha256": HEX.upper()}, KeySource)
    assert findings == []
    assert values["key_sha256"] == HEX


@pytest.mark.parametrize(
    "sources",
    [
        {},
        {"key_env": ""},
        {"key_env": "A", "key_file": "b"},
        {"key_env": "A", "key_file": "b", "key_sha256": HEX},
    ],
)
def test_no_source_or_several_are_refused(sources):
    ((path, reason, _),) = findings_of({"name": "a", **sources})
    assert path == ("keys", 0)
    assert "exactly one of key_env, key_file, key_sha256" in reason


@pytest.mark.parametrize("key", ["key", "api_key", "token"])
def test_a_key_in_the_file_itself_is_refused_without_repeating_it(key):
    findings = findings_of({"name": "a", "key_env": "A", key: "sk-secret"})
    ((path, reason, hint),) = findings
    assert path == (key,)
    assert reason == "unknown key"
    assert "keys are not written into the file" in hint
    assert "sk-secret" not in str(findings)


@pytest.mark.parametrize("value", ["sk-secret", "ab" * 31, "zz" * 32])
def test_an_invalid_hash_is_refused_without_repeating_it(value):
    findings = findings_of({"name": "a", "key_sha256": value})
    assert findings[0][0] == ("key_sha256",)
    assert value not in str(findings)


def test_an_invalid_variable_name_is_refused_without_repeating_it():
    findings = findings_of({"name": "a", "key_env": "sk-secret"})
    assert findings[0][0] == ("key_env",)
    assert "sk-secret" not in str(findings)


@pytest.mark.parametrize("name", ["", "team a", 'a"b', "a\n", "x" * 65])
def test_a_name_that_would_break_a_log_line_is_refused(name):
    assert findings_of({"name": name, "key_env": "A"})[0][0] == ("name",)


def test_equal_names_and_equal_hashes_are_refused():
    tables = [{"name": "a", "key_sha256": HEX}, {"name": "a", "key_sha256": HEX}]
    findings = findings_of(*tables)
    assert [path for path, _, _ in findings] == [("keys", 1, "name"), ("keys", 1, "key_sha256")]
    assert HEX not in str(findings)
