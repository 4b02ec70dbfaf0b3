import pytest

from omni_proxy.config.parse import ConfigError, parse


def alias(name, *models):
    listed = ", ".join(f'{{ model = "{model}" }}' for model in models)
    return f'[[routing.models]]\nname = "{name}"\ntargets = [{listed}]\n'


@pytest.mark.parametrize("other", ["a", "model"])
def test_a_target_that_is_another_alias_is_refused(other):
    with pytest.raises(ConfigError, match='"b" is an alias itself'):
        parse(alias("a", "b") + alias("b", other))


def test_a_model_with_the_name_of_its_alias_may_be_a_target():
    parsed = parse(alias("a", "a", "b"))
    assert [target.model for target in parsed.routing.models[0].targets] == ["a", "b"]
