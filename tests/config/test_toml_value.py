import tomllib

import pytest

from omni_proxy.config.toml_value import toml


@pytest.mark.parametrize("value", [True, False, 3, 0.5, "a", ""])
def test_a_value_reads_back_as_itself(value):
    assert tomllib.loads(f"key = {toml(value)}") == {"key": value}
