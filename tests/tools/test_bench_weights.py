"""The weights bench: how it measures the memory of other processes and event-loop delay."""

import math
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.process_group.wait_helpers import wait_until
from tools.bench.weights.fleet import Figure, rows_of
from tools.bench.weights.loop_delay import quantile_bound
from tools.bench.weights.memory import tree, unbacked_bytes, watched

MIB = 1 << 20
# Allocates memory as stdin requests: private memory, or a shared file that its fork maps as well.
MEMORY_USER = """
import mmap, os, sys
private, shared = [], []
for line in sys.stdin:
    kind, mib = line.split()
    size = int(mib) << 20
    if kind == "own":
        private.append(bytearray(b"x") * size)
    elif kind == "free":
        private.clear()
    else:
        file = os.memfd_create("shared")
        os.ftruncate(file, size)
        shared.append(mmap.mmap(file, size))
        shared[-1].write(b"x" * size)
        if not os.fork():
            sum(shared[-1][::4096])
            print("forked", flush=True)
            os.read(0, 1)
            os._exit(0)
        continue
    print("done", flush=True)
"""


@contextmanager
def memory_user():
    argv = [sys.executable, "-c", MEMORY_USER]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:

        def take(kind, mib=0):
            print(kind, mib, file=process.stdin, flush=True)
            assert process.stdout.readline()

        yield process, take


def test_memory_that_was_freed_during_the_measurement_counts():
    with memory_user() as (process, take):
        take("own", 1)
        with watched(lambda: tree(process.pid), 0) as peak:
            take("own", 24)
            readings = peak.readings
            # Wait for a reading that began after the allocation.
            wait_until(lambda: peak.readings > readings + 1)
            take("free")
        assert 23 * MIB < peak.extra_bytes < 40 * MIB


def test_shared_pages_count_once_and_the_versions_file_not_at_all():
    with memory_user() as (process, take):
        take("own", 1)
        with (
            watched(lambda: tree(process.pid), 0) as whole,
            watched(lambda: tree(process.pid), 24 * MIB) as without_file,
        ):
            take("shared", 24)
            assert len(tree(process.pid)) == 2
            whole.look()
            without_file.look()
        # To write the pages, the process needs as much private memory.
        assert 24 * MIB <= whole.extra_bytes < 60 * MIB
        assert whole.extra_bytes - without_file.extra_bytes <= 24 * MIB
        _, shared = unbacked_bytes(tree(process.pid))
        assert 24 * MIB <= shared < 28 * MIB
        process.stdin.close()


def test_a_process_that_has_ended_uses_no_memory():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert unbacked_bytes([ended.pid]) == (0, 0)
    assert os.getpid() in tree(os.getpid())


@pytest.mark.parametrize(
    ("counts", "bound"),
    [
        ({0.001: 99, 0.01: 100, math.inf: 100}, 0.001),
        ({0.001: 98, 0.01: 100, math.inf: 100}, 0.01),
        ({0.001: 0, 0.01: 0, math.inf: 5}, math.inf),
    ],
)
def test_the_bound_of_the_99th_percentile(counts, bound):
    assert quantile_bound(counts) == bound


@pytest.mark.parametrize("counts", [{}, {0.001: 0, math.inf: 0}])
def test_without_observations_there_is_no_percentile(counts):
    assert math.isnan(quantile_bound(counts))


def test_figures_of_all_rounds_have_one_row():
    rounds = [[Figure("GB/s", value, value / 2)] for value in (1.0, 3.0, 2.0)]
    rows = rows_of("receive", [*rounds, [Figure("peak, buckets of 64 MiB", 0.25)]])
    assert rows == [
        ["receive: GB/s", "2.00 (1.00..3.00)", "1.00 (0.50..1.50)", ""],
        ["receive: peak, buckets of 64 MiB", "0.25 (0.25..0.25)", "", "at most 3"],
    ]
