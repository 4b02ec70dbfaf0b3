import errno
import os
import resource
import subprocess
import sys

from omni_proxy.system.fd_limit import accept_fd_limit, is_resource_exhaustion, lowest_free_fd


def test_a_reserve_of_descriptors_is_kept_below_the_limit():
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert soft - 64 <= accept_fd_limit() < soft


def test_the_lowest_free_descriptor_is_the_next_one_to_be_opened():
    with open(os.devnull) as one:
        expected = lowest_free_fd(one.fileno())
        with open(os.devnull) as other:
            assert other.fileno() == expected
            assert lowest_free_fd(one.fileno()) > expected


def test_only_errors_of_descriptors_or_memory_are_resource_exhaustion():
    assert is_resource_exhaustion(OSError(errno.EMFILE, "x"))
    assert not is_resource_exhaustion(OSError(errno.ECONNREFUSED, "x"))
    assert not is_resource_exhaustion(ValueError())


def test_the_soft_limit_is_raised_to_the_hard_one():
    code = (
        "import resource as r\nfrom omni_proxy.system.fd_limit import raise_fd_limit\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (64, 300))\nraise_fd_limit()\n"
        "print(*r.getrlimit(r.RLIMIT_NOFILE))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["300", "300"]
