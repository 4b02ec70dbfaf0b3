"""The end of real processes whose threads are blocked."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.ports import free_port
from tests.process_group.trainer_process import TrainerPool
from tests.replica.weights.sync_steps import NORM, UP, many, sent_of

PATIENCE_SECS = 60
HELD = "threads_blocked_at_exit reason=peer_does_not_answer threads="
BUCKET = sent_of([UP, NORM])


@pytest.fixture
def trainer():
    pool = TrainerPool()
    yield pool.trainer()
    pool.close()


@pytest.fixture(params=[(), ("--own-process", "decode")], ids=["one process", "two processes"])
def replica(request):
    """A replica that receives in its own threads, and its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "omni_proxy", "replica", "--engine", "torch", "--model", "tiny"]
    argv += ["--port", str(port), "--weights-isolation", "thread", *request.param]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            output = ""
            while "is served at" not in output:
                output = process.stderr.readline()
                assert output, "it ended before it was ready"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def post(url, path, **body):
    answer = httpx.post(url + path, json=body, timeout=PATIENCE_SECS)
    assert answer.status_code == 200, answer.text


def test_a_replica_reported_to_stop_ends_as_meant_though_a_silent_trainer_holds_it(
    replica, trainer
):
    process, url = replica
    port = trainer.tell("open", group="g")["port"]
    master = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    group = {"group_name": "g", "backend": "gloo", "rank_offset": 1}
    post(url, "/init_weights_update_group", **master, **group)
    assert trainer.reply() == {"joined": True}
    post(url, "/prepare_weights_update", **many(BUCKET))
    trainer.process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, body = process.communicate(timeout=PATIENCE_SECS)
    assert process.returncode == 0
    (line,) = [line for line in body.splitlines() if HELD in line]
    assert line.endswith(HELD + "weights-receive-g")


LEAVES = """
import sys, threading
from omni_proxy.replica.hard_exit import exit_process
for name in ("weights-init-a", "weights-receive-b", "other"):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
print("last words")
exit_process(3)
"""


def left(**streams):
    argv = [sys.executable, "-c", LEAVES]
    buffered = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        argv, env=buffered, text=True, timeout=PATIENCE_SECS, check=False, **streams
    )


def test_output_is_flushed_and_threads_are_reported_in_one_line():
    done = left(capture_output=True)
    assert (done.returncode, done.stdout) == (3, "last words\n")
    assert done.stderr == HELD + "weights-init-a,weights-receive-b\n"


def test_a_process_without_a_reader_ends_with_its_status():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert left(stdout=writer, stderr=writer).returncode == 3
    finally:
        os.close(writer)
