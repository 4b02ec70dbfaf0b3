"""Real processes exit although some of their threads are blocked."""

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.ports import free_port
from tests.process_group.trainer_process import TrainerPool
from tests.replica.weights.sync_steps import NORM, UP, bucket_of, multi_bucket

PATIENCE_SECS = 60
BLOCKED_THREADS = "threads_blocked_at_exit reason=peer_does_not_answer threads="
BUCKET = bucket_of([UP, NORM])


@pytest.fixture
def trainer():
    pool = TrainerPool()
    yield pool.trainer()
    pool.close()


@pytest.fixture(params=[(), ("--own-process", "decode")], ids=["one process", "two processes"])
def replica(request):
    """A replica process that receives weights in its own threads, and its URL."""
    port = free_port()
    argv = [sys.executable, "-m", "omni_proxy", "replica", "--engine", "torch", "--model", "tiny"]
    argv += ["--port", str(port), "--weights-isolation", "thread", *request.param]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as process:
        try:
            line = ""
            while "replica_ready" not in line:
                line = process.stderr.readline()
                assert line, "the replica exited before it was ready"
            yield process, f"http://127.0.0.1:{port}"
        finally:
            process.kill()


def post(url, path, **body):
    response = httpx.post(url + path, json=body, timeout=PATIENCE_SECS)
    assert response.status_code == 200, response.text


def test_a_stopped_replica_exits_with_0_while_a_silent_trainer_blocks_a_thread(replica, trainer):
    process, url = replica
    port = trainer.tell("open", group="g")["port"]
    store = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    group = {"group_name": "g", "backend": "gloo", "rank_offset": 1}
    post(url, "/init_weights_update_group", **store, **group)
    assert trainer.reply() == {"joined": True}
    post(url, "/prepare_weights_update", **multi_bucket(BUCKET))
    trainer.process.send_signal(signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=PATIENCE_SECS)
    assert process.returncode == 0
    (line,) = [line for line in stderr.splitlines() if BLOCKED_THREADS in line]
    assert line.endswith(BLOCKED_THREADS + "weights-receive-g")


EXITING_PROGRAM = """
import sys, threading
from omni_proxy.replica.hard_exit import exit_process
for name in ("weights-init-a", "weights-receive-b", "other"):
    threading.Thread(target=threading.Event().wait, name=name, daemon=True).start()
print("last words")
exit_process(3)
"""


def run_exiting_program(**streams):
    argv = [sys.executable, "-c", EXITING_PROGRAM]
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        argv, env=environment, text=True, timeout=PATIENCE_SECS, check=False, **streams
    )


def test_exit_flushes_output_and_reports_blocked_threads_in_one_line():
    process = run_exiting_program(capture_output=True)
    assert (process.returncode, process.stdout) == (3, "last words\n")
    assert process.stderr == BLOCKED_THREADS + "weights-init-a,weights-receive-b\n"


def test_a_process_whose_output_has_no_reader_exits_with_its_status():
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert run_exiting_program(stdout=writer, stderr=writer).returncode == 3
    finally:
        os.close(writer)
