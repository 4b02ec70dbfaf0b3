import pytest

from omni_proxy.replica.weights.lifecycle import IntegrityState, VersionIntegrity


def after(*events):
    integrity = VersionIntegrity()
    for event in events:
        if event in ("bucket", "last"):
            integrity.bucket(last=event == "last")
        else:
            getattr(integrity, event)()
    return integrity


@pytest.mark.parametrize(
    ("events", "weights", "buckets"),
    [
        ([], "whole", 0),
        (["last"], "whole", 0),
        (["bucket"], "open", 1),
        (["bucket", "bucket"], "open", 2),
        (["bucket", "last"], "whole", 0),
        (["bucket", "left"], "whole", 0),
        (["bucket", "broken"], "uncertain", 1),
        (["broken"], "whole", 0),
        (["bucket", "broken", "left"], "uncertain", 1),
        (["bucket", "broken", "bucket"], "uncertain", 2),
        (["bucket", "broken", "bucket", "last"], "whole", 0),
        (["bucket", "broken", "whole"], "whole", 0),
        (["damaged"], "uncertain", 0),
        (["damaged", "left"], "uncertain", 0),
        (["bucket", "damaged"], "uncertain", 1),
        (["damaged", "last"], "whole", 0),
    ],
)
def test_events_determine_the_integrity_of_the_weights(events, weights, buckets):
    integrity = after(*events)
    assert integrity.facts() == {"weights": weights, "buckets_applied": buckets}
    whole = integrity.standing is IntegrityState.WHOLE
    assert ("are whole" in integrity.describe("v1")) is whole
    assert "'v1'" in integrity.describe("v1")
