"""Cards of aliases and adapters, added to those that workers list."""

import pytest

from omni_proxy.admin_api.serializers.model_cards import with_own_cards


@pytest.mark.parametrize("name", [None, [], {}, 7, True])
def test_a_card_of_a_worker_may_have_anything_as_its_id(name):
    cards = [{"id": name}, {}, {"id": "m"}]
    assert with_own_cards(cards, [], {}, 0) == cards
