"""Stands in for the interpreter where a program of the tests starts another one: `-m omni_proxy …`,
with steps `-m tests.promises.stepping_program …`, or the trainer of tools, `-m tools.training …`.

It has the fork server make a process with its own words, environment, folder and descriptors, and
ends as that one ends. Signals are handed on; SIGKILL, too, for the fork server kills the process as
soon as this connection is closed. SIGSTOP stops only this process. Run with `python -SEs`, and
imports only what is built in: it takes milliseconds, an import of torch seconds.
"""

import _signal as signal
import _socket as socket
import marshal
import posix as os
import sys

PROXY, STEPPING = "omni_proxy", "tests.promises.stepping_program"
TRAINER = "tools.training"
TORCH = ("replica", "receiver-process")  # commands that need the fork server which has it
HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(folder: str, words: list[str]) -> int:
    if words[:1] != ["-m"] or words[1] not in (PROXY, STEPPING, TRAINER):
        os.execv(sys.executable, [sys.executable, *words])
    module, first = words[1], "".join(words[2:3])
    server = "replica" if module == TRAINER or first in TORCH else "proxy"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{folder}/{server}")
    except OSError:  # there is no such fork server, or not any more
        os.execv(sys.executable, [sys.executable, *words])
    opened = [int(number) for number in os.listdir("/proc/self/fd")]
    given = [number for number in opened if number != connection.fileno() and is_open(number)]
    environ = {key.decode(): value.decode() for key, value in os.environ.items()}
    asked = marshal.dumps((words[1:], environ, os.getcwd(), given))
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in given)
    connection.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
    for number in given:
        os.close(number)
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = int(connection.recv(32) or b"1")
    if status >= 0:
        return status
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 1


def is_open(number: int) -> bool:
    """False for the one that listed them."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    os._exit(main(sys.argv[0].rpartition("/")[0], sys.argv[1:]))
