import copy
import json

from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.diff import diff, redacted
from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config

LISTS = {
    "workers": "url", "launch": "name", "routes": "path", "control_routes": "path", "keys": "name",
    "discover": "name",
}  # fmt: skip
NOTHING = {"added": [], "removed": [], "changed": {}}


def patched(tables, changes, new):
    """Apply `changes` to a copy of `tables`; added entries are taken from `new`."""
    tables = copy.deepcopy(tables)
    for key, (_, value) in changes["changed"].items():
        *sections, name = key.split(".")
        table = tables
        for section in sections:
            table = table[section]
        table[name] = value
    for name, key in LISTS.items():
        entries = {entry[key]: entry for entry in tables[name]}
        for removed in changes[name]["removed"]:
            del entries[removed]
        for added in changes[name]["added"]:
            entries[added] = next(entry for entry in new[name] if entry[key] == added)
        for changed, fields in changes[name]["changed"].items():
            entries[changed] |= {field: value for field, (_, value) in fields.items()}
        tables[name] = sorted(entries.values(), key=lambda entry: entry[key])
    return tables


@given(st.data())
def test_the_old_tables_with_a_difference_are_the_new_tables(configs, data):
    old, new = data.draw(configs), data.draw(configs)
    shown = redacted(new)
    expected = shown | {
        name: sorted(shown[name], key=lambda entry, key=key: entry[key])
        for name, key in LISTS.items()
    }
    assert patched(redacted(old), json.loads(json.dumps(diff(old, new))), shown) == expected


def test_equal_configurations_have_an_empty_difference():
    config = parse('[[workers]]\nurl = "http://a"')
    assert diff(config, config) == {"changed": {}, **dict.fromkeys(LISTS, NOTHING)}


def test_a_difference_names_keys_workers_and_groups():
    old = parse(
        '[health]\ninterval_secs = 10\n[[workers]]\nurl = "http://a"\n[[workers]]\nurl = "http://b"'
    )
    new = parse(
        '[health]\ninterval_secs = 5\n[[workers]]\nurl = "http://b"\ndisabled = true\n'
        '[[workers]]\nurl = "http://c"\n[[launch]]\ncommand = ["run"]'
    )
    assert diff(old, new) == {
        **dict.fromkeys(LISTS, NOTHING),
        "changed": {"health.interval_secs": [10, 5]},
        "workers": {
            "added": ["http://c"],
            "removed": ["http://a"],
            "changed": {"http://b": {"disabled": [False, True]}},
        },
        "launch": {"added": ["local"], "removed": [], "changed": {}},
    }


SECRETS = """
admin.api_key = "hush-1"
[[launch]]
command = ["run", "--admin-api-key", "hush-2", "--hf-token=hush-3", "--port", "{port}", "--key"]
env = {HF_TOKEN = "hush-4", OPENAI_API_KEY = "hush-5", PASSWORD = "hush-6", OMP_NUM_THREADS = "1"}
"""


def test_no_secret_is_shown():
    config = parse(SECRETS)
    tables = redacted(config)
    assert "hush" not in json.dumps(tables) + json.dumps(diff(Config(), config))
    assert tables["admin"]["api_key"] == "***"
    assert tables["launch"][0]["env"]["OMP_NUM_THREADS"] == "1"
    assert tables["launch"][0]["command"][1:4] == ["--admin-api-key", "***", "--hf-token=***"]
    assert redacted(Config())["admin"]["api_key"] == ""


def test_a_changed_secret_is_a_change():
    old, new = parse("admin.api_key = 'hush'"), parse("admin.api_key = 'hushed'")
    assert diff(old, new)["changed"] == {"admin.api_key": ["***", "***"]}
    assert diff(parse(SECRETS), parse(SECRETS.replace("hush-4", "hush-7")))["launch"]["changed"]


def test_the_shown_tables_are_complete():
    assert redacted(Config())["server"]["timeouts"]["connect_secs"] == 5
    assert list(redacted(Config())) == [
        "server",
        "routing",
        "health",
        "admin",
        "observe",
        "weight_sync",
        "cluster",
        "picker",
        "workers",
        "launch",
        "discover",
        "routes",
        "control_routes",
        "keys",
    ]
