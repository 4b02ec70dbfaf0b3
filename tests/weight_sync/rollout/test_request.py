import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_proxy.weight_sync.rollout.request import KEYS, RolloutRequest, Share, parse_rollout
from omni_proxy.wire.errors import HttpError

PATH = {"model_path": "/m/v2", "weight_version": "v2"}


def test_a_path_and_a_label_are_sufficient():
    assert parse_rollout(PATH) == RolloutRequest(model_path="/m/v2", weight_version="v2")


def test_a_stored_version_needs_no_label():
    assert parse_rollout({"version": 3}) == RolloutRequest(version=3)
    assert parse_rollout({"version": "step-3"}).version == "step-3"


def test_all_keys_are_parsed():
    body = {
        **PATH, "max_unavailable": "25%", "canary": 2, "pause_after_canary": True,
        "drain_secs": 0, "load_format": "safetensors",
    }  # fmt: skip
    assert set(body) | {"version"} == set(KEYS)
    parsed = parse_rollout(body)
    assert (parsed.max_unavailable, parsed.canary) == (Share(0, 25), 2)
    assert (parsed.pause_after_canary, parsed.drain_secs) == (True, 0.0)
    assert parse_rollout({**PATH, "canary": None, "drain_secs": None}) == parse_rollout(PATH)


def test_a_percentage_is_of_all_workers_and_at_least_one():
    assert [Share(0, 25).of(total) for total in (1, 3, 4, 10)] == [1, 1, 1, 2]
    assert Share(3).of(10) == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "nothing to roll out: give model_path"),
        ({"model_path": "/m"}, "weight_version is missing"),
        ({**PATH, "version": 1}, "model_path and version are both given"),
        ({"model_path": 5, "weight_version": "v"}, "model_path must be a non-empty string, not 5"),
        ({"model_path": " ", "weight_version": "v"}, "model_path must be a non-empty string"),
        ({"model_path": "/m", "weight_version": "v\n2"}, "weight_version must be printable"),
        ({"model_path": "/" + "m" * 5000, "weight_version": "v"}, "at most 4096 characters"),
        ({"version": True}, "version must be the number or the label"),
        ({"version": 1.5}, "version must be the number or the label"),
        ({"version": 1, "load_format": "auto"}, "load_format is for model_path only"),
        ({**PATH, "max_unavailable": 0}, "max_unavailable must be a whole number of workers, at least 1"),
        ({**PATH, "max_unavailable": True}, "max_unavailable must be a whole number"),
        ({**PATH, "max_unavailable": "0%"}, "within 1% and 100%"),
        ({**PATH, "max_unavailable": "250%"}, "within 1% and 100%"),
        ({**PATH, "max_unavailable": "many"}, 'as in "25%"'),
        ({**PATH, "canary": -1}, "canary must be a whole number of workers, at least 0"),
        ({**PATH, "canary": "1"}, "canary must be a whole number"),
        ({**PATH, "canary": 0, "pause_after_canary": True}, "needs a canary of at least 1"),
        ({**PATH, "pause_after_canary": "yes"}, "must be true or false"),
        ({**PATH, "drain_secs": -1}, "drain_secs must be a number of seconds"),
        ({**PATH, "drain_secs": float("nan")}, "drain_secs must be a number of seconds"),
        ({**PATH, "max_unavailible": 1}, "did you mean max_unavailable?"),
        ({**PATH, "zzz": 1}, "the keys are model_path"),
    ],
)  # fmt: skip
def test_the_error_names_what_is_wrong_and_how_to_correct_it(body, message):
    with pytest.raises(HttpError) as refusal:
        parse_rollout(body)
    assert (refusal.value.status, refusal.value.code) == (400, "invalid_rollout")
    assert message in refusal.value.message


VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())
)


@given(st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text()), VALUES))
def test_any_object_is_parsed_or_refused(body):
    try:
        parsed = parse_rollout(body)
    except HttpError:
        return
    assert bool(parsed.model_path) is (parsed.version is None)
    assert parsed.max_unavailable.of(10) >= 1
