import fcntl
import os
import socket
import subprocess
import sys
import time

from tests.processes import alive
from tests.program_forkserver import forking_interpreter

# Its main thread ends while another thread waits for stdin.
THREAD_LEFT = """
import ctypes, platform, sys, threading
threading.Thread(target=sys.stdin.read).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)  # exit of one thread
"""


def test_a_process_lives_until_its_last_thread_has_ended():
    with subprocess.Popen([sys.executable, "-c", THREAD_LEFT], stdin=subprocess.PIPE) as process:
        with open(f"/proc/{process.pid}/stat") as stat:
            while stat.read().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)  # noqa: TID251  no event loop runs here
                stat.seek(0)
        assert alive(process.pid)
        process.kill()
        while alive(process.pid):
            time.sleep(0.01)  # noqa: TID251
    assert process.returncode == -9


def test_a_fork_gets_descriptors_with_large_numbers():
    """A test process can have more than a thousand descriptors open."""
    own_end, child_end = socket.socketpair()
    with own_end, child_end:
        number = fcntl.fcntl(child_end.fileno(), fcntl.F_DUPFD, 1000)
        try:
            command = [forking_interpreter(), "-m", "omni_proxy", "replica", "stage-process"]
            process = subprocess.Popen([*command, str(number)], pass_fds=[number])
        finally:
            os.close(number)
        child_end.close()
        own_end.shutdown(socket.SHUT_WR)  # without messages, the process ends
        assert process.wait(60) == 0
