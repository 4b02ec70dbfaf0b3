from omni_proxy.replica.pipeline.config import merge_fields, merge_terminals


def test_terminals_are_kept_apart_under_their_names():
    results = {"decode": {"text": "a"}, "speak": {"audio_data": b"b"}}
    assert merge_terminals(results) == results
    assert merge_terminals(results) is not results


def test_fan_in_puts_the_keys_of_all_together():
    assert merge_fields({"a": {"x": 1, "z": 1}, "b": {"y": 2, "z": 2}}) == {"x": 1, "y": 2, "z": 2}
