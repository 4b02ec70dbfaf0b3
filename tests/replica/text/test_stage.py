import pytest

from omni_proxy.replica.text.stage import build
from tests.replica.text.scheduler_harness import submission, undisturbed


def test_the_factory_makes_a_stage_that_answers():
    scheduler, reported = build("decode", model="tiny", seed=0), []
    scheduler.emit = reported.append
    scheduler.take(submission("a", temperature=0, max_new_tokens=5))
    while scheduler.busy:
        scheduler.step()
    assert reported[-1].stage == "decode"
    assert reported[-1].data["text"] == undisturbed(temperature=0, max_new_tokens=5)["text"]
    assert scheduler.info["model"] == "tiny"


def test_another_seed_is_another_model():
    scheduler, reported = build("decode", seed=1), []
    scheduler.emit = reported.append
    scheduler.take(submission("a", temperature=0, max_new_tokens=5))
    while scheduler.busy:
        scheduler.step()
    assert reported[-1].data["text"] != undisturbed(temperature=0, max_new_tokens=5)["text"]


@pytest.mark.parametrize(
    ("params", "reported"),
    [
        ({"max_runing": 3}, "no parameter 'max_runing'; a text stage has model, seed"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"threads": -1}, "threads must be at least 0"),
        ({"model": "unheard-of"}, "unheard-of"),
    ],
)
def test_wrong_parameters_are_refused_by_name(params, reported):
    with pytest.raises(ValueError, match=reported):
        build("decode", **params)


def test_threads_are_given_to_torch():
    import torch

    before = torch.get_num_threads()
    try:
        build("decode", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
