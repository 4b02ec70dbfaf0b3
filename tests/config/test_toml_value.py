import tomllib

import pytest

from omni_proxy.config.problem import to_toml_literal


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "a", ""])
def test_a_value_reads_back_as_itself(value):
    assert tomllib.loads(f"key = {to_toml_literal(value)}") == {"key": value}
