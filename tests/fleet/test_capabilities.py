import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.fields import CAPABILITIES
from omni_proxy.fleet.worker import (
    CAPABILITY_BITS,
    capability_mask,
    capability_names,
)

some_names = st.sets(st.sampled_from(CAPABILITIES))


@given(some_names)
def test_the_names_of_a_mask_are_sorted(names):
    assert capability_names(capability_mask(names)) == sorted(names)


@given(some_names, some_names)
def test_a_mask_contains_another_as_sets_do(has, needs):
    assert (capability_mask(has) & capability_mask(needs) == capability_mask(needs)) == (
        needs <= has
    )


def test_every_capability_has_its_own_bit():
    assert sorted(CAPABILITY_BITS) == sorted(CAPABILITIES)
    assert (
        sum(CAPABILITY_BITS.values())
        == (1 << len(CAPABILITIES)) - 1
        == capability_mask(CAPABILITIES)
    )


def test_an_unknown_name_is_an_error():
    with pytest.raises(KeyError):
        capability_mask(["chat", "fly"])
