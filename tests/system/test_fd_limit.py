import errno
import os
import resource
import subprocess
import sys

from omni_proxy.system.fd_limit import accept_fd_limit, is_resource_exhaustion, lowest_free_fd


def test_the_reserve_is_kept_short_of_the_limit():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft - 64 <= accept_fd_limit() < soft


def test_the_lowest_free_one_is_what_the_next_would_get():
    with open(os.devnull) as one:
        expected = lowest_free_fd(one.fileno())
        with open(os.devnull) as other:
            assert other.fileno() == expected
            assert lowest_free_fd(one.fileno()) > expected


def test_only_want_of_room_is_our_own_fault():
    assert is_resource_exhaustion(OSError(errno.EMFILE, "x"))
    assert not is_resource_exhaustion(OSError(errno.ECONNREFUSED, "x"))
    assert not is_resource_exhaustion(ValueError())


def test_the_soft_limit_is_raised_to_the_hard_one():
    code = (
        "import resource as r\nfrom omni_proxy.system.fd_limit import raise_fd_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 300))\nraise_fd_limit()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["300", "300"]
