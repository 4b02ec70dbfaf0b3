import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.config.schema import CAPABILITIES
from omni_proxy.fleet.capabilities import ALL, BIT, mask_of, names_in

some_names = st.sets(st.sampled_from(CAPABILITIES))


@given(some_names)
def test_names_come_back_sorted(names):
    assert names_in(mask_of(names)) == sorted(names)


@given(some_names, some_names)
def test_a_mask_covers_another_as_sets_do(has, needs):
    assert (mask_of(has) & mask_of(needs) == mask_of(needs)) == (needs <= has)


def test_every_name_has_a_bit_of_its_own():
    assert sorted(BIT) == sorted(CAPABILITIES)
    assert sum(BIT.values()) == ALL == mask_of(CAPABILITIES)


def test_an_unknown_name_is_no_capability():
    with pytest.raises(KeyError):
        mask_of(["chat", "fly"])
