import re
import tomllib
from pathlib import Path

from msgspec import NODEFAULT, inspect

from omni_proxy.config.parse import parse
from omni_proxy.config.schema import Config

TEXT = (Path(__file__).parents[2] / "config" / "example.toml").read_text()
# The same file with every key uncommented.
WHOLE = re.sub(r"^# (?=\[\[?[a-z_.]+\]|[a-z0-9_]+ = )", "", TEXT, flags=re.MULTILINE)


def schema_keys(kind, prefix=""):
    for field in kind.fields:
        inner = field.type
        inner = inner.item_type if isinstance(inner, inspect.VarTupleType) else inner
        if isinstance(inner, inspect.StructType):
            yield from schema_keys(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def written_keys(table, prefix=""):
    for key, value in table.items():
        inner = value[0] if isinstance(value, list) and value else value
        if isinstance(inner, dict) and prefix + key != "launch.env":
            yield from written_keys(inner, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_example_loads_and_starts_two_replicas():
    config = parse(TEXT, "config/example.toml")
    (group,) = config.launch
    assert group.urls == ("http://127.0.0.1:31000", "http://127.0.0.1:31001")
    assert config.workers == ()
    assert config.health.on_threshold == "unhealthy"


def test_the_example_has_exactly_the_keys_of_the_schema():
    assert set(written_keys(tomllib.loads(WHOLE))) == set(schema_keys(inspect.type_info(Config)))


def test_the_commented_keys_have_valid_values():
    assert len(parse(WHOLE).workers) == 1


def test_every_line_with_a_key_has_a_comment():
    bare = [line for line in TEXT.splitlines() if re.match(r"(# )?[a-z0-9_]+ = ", line)]
    assert all(line.count("#") > line.startswith("#") for line in bare)


def test_a_default_that_the_example_shows_is_the_default():
    shown = tomllib.loads(WHOLE)
    chosen = {"routing.policy", "routing.models", "admin.keys"}
    for table in inspect.type_info(Config).fields[:5]:
        for field in table.type.fields:
            if field.default is NODEFAULT or f"{table.name}.{field.name}" in chosen:
                continue
            parsed = getattr(getattr(parse(WHOLE), table.name), field.name)
            assert field.name in shown[table.name]
            assert parsed == field.default
