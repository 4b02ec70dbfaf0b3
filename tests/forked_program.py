"""Replaces the interpreter where a program of the tests starts another one: `-m omni_proxy …`,
`-m tests.promises.support.stepping_program …`, or the trainer of tools, `-m tools.training …`.

The fork server starts a process with the arguments, environment, folder and descriptors of this
one, which then ends with the same status. Signals are forwarded. So is SIGKILL: the fork server
kills the process when this connection is closed. SIGSTOP stops only this process. It runs with
`python -SEs` and imports only built-in modules, so it takes milliseconds, while importing torch
takes seconds.
"""

import _signal as signal
import _socket as socket
import marshal
import posix as os
import sys

PROXY, STEPPING = "omni_proxy", "tests.promises.support.stepping_program"
TRAINER = "tools.training"
TORCH = ("replica", "receiver-process")  # commands that need the fork server with torch
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(folder: str, arguments: list[str]) -> int:
    if arguments[:1] != ["-m"] or arguments[1] not in (PROXY, STEPPING, TRAINER):
        os.execv(sys.executable, [sys.executable, *arguments])
    module, first = arguments[1], "".join(arguments[2:3])
    server = "replica" if module == TRAINER or first in TORCH else "proxy"
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(f"{folder}/{server}")
    except OSError:  # there is no such fork server
        os.execv(sys.executable, [sys.executable, *arguments])
    opened = [int(number) for number in os.listdir("/proc/self/fd")]
    descriptors = [number for number in opened if number != connection.fileno() and is_open(number)]
    environ = {key.decode(): value.decode() for key, value in os.environ.items()}
    request = marshal.dumps((arguments[1:], environ, os.getcwd(), descriptors))
    packed = b"".join(number.to_bytes(4, sys.byteorder) for number in descriptors)
    connection.sendmsg([request], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
    for number in descriptors:
        os.close(number)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: connection.send(bytes([number])))
    status = int(connection.recv(32) or b"1")
    if status >= 0:
        return status
    signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    return 1


def is_open(number: int) -> bool:
    """False for the descriptor that was used to list them."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    os._exit(main(sys.argv[0].rpartition("/")[0], sys.argv[1:]))
