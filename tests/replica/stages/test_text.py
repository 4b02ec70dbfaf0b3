import pytest

from omni_proxy.replica.stages.text import build
from tests.replica.text.scheduler_harness import submission, undisturbed


def test_the_factory_builds_a_stage_that_serves_requests():
    scheduler, emitted = build("decode", model="tiny", seed=0), []
    scheduler.emit = emitted.append
    scheduler.take(submission("a", temperature=0, max_new_tokens=5))
    while scheduler.busy:
        scheduler.step()
    assert emitted[-1].stage == "decode"
    assert emitted[-1].data["text"] == undisturbed(temperature=0, max_new_tokens=5)["text"]
    assert scheduler.info["model"] == "tiny"


def test_another_seed_gives_another_model():
    scheduler, emitted = build("decode", seed=1), []
    scheduler.emit = emitted.append
    scheduler.take(submission("a", temperature=0, max_new_tokens=5))
    while scheduler.busy:
        scheduler.step()
    assert emitted[-1].data["text"] != undisturbed(temperature=0, max_new_tokens=5)["text"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_runing": 3}, "no parameter 'max_runing'; a text stage has model, seed"),
        ({"max_running": 0}, "max_running must be at least 1"),
        ({"prefill_chunk": 0}, "prefill_chunk must be at least 1"),
        ({"threads": -1}, "threads must be at least 0"),
        ({"model": "unheard-of"}, "unheard-of"),
    ],
)
def test_invalid_parameters_are_refused_by_name(params, message):
    with pytest.raises(ValueError, match=message):
        build("decode", **params)


def test_threads_are_set_in_torch():
    import torch

    before = torch.get_num_threads()
    try:
        build("decode", threads=1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
