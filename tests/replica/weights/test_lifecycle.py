import pytest

from omni_proxy.replica.weights.lifecycle import IntegrityState, VersionIntegrity


def after(*events):
    found = VersionIntegrity()
    for event in events:
        if event in ("bucket", "last"):
            found.bucket(last=event == "last")
        else:
            getattr(found, event)()
    return found


@pytest.mark.parametrize(
    ("events", "standing", "buckets"),
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
def test_what_is_known_after(events, standing, buckets):
    found = after(*events)
    assert found.facts() == {"weights": standing, "buckets_applied": buckets}
    whole = found.standing is IntegrityState.WHOLE
    assert ("are whole" in found.describe("v1")) is whole
    assert "'v1'" in found.describe("v1")
