import pytest

from omni_proxy.process_group.cancel_token import CancelToken


def test_what_is_said_is_heard_once_by_who_listens_before_or_after():
    heard = []
    stop = CancelToken()
    stop.hear(heard.append)
    stop.say("enough")
    stop.say("again")
    assert (heard, stop.why) == (["enough"], "enough")
    stop.hear(heard.append)
    assert heard == ["enough", "enough"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_nobody_need_listen(when):
    heard = []
    stop = CancelToken()
    if when == "after":
        stop.hear(heard.append)
        stop.hear(None)
    stop.say("enough")
    assert heard == []
