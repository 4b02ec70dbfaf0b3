import pytest

from omni_proxy.collective.stop import Stop


def test_what_is_said_is_heard_once_by_who_listens_before_or_after():
    heard = []
    stop = Stop()
    stop.hear(heard.append)
    stop.say("enough")
    stop.say("again")
    assert (heard, stop.why) == (["enough"], "enough")
    stop.hear(heard.append)
    assert heard == ["enough", "enough"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_need_listen(when):
    heard = []
    stop = Stop()
    if when == "after":
        stop.hear(heard.append)
        stop.hear(None)
    stop.say("enough")
    assert heard == []
