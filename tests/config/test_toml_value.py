import tomllib

import pytest

from omni_proxy.config.problem import to_toml_literal


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "a", ""])
def test_a_literal_parses_to_its_value(value):
    assert tomllib.loads(f"key = {to_toml_literal(value)}") == {"key": value}
