"""The figures of the weights bench that are not a clock's: memory of other processes, lateness."""

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
# Takes memory as it is told to: some of its own, and a shared file that a fork of it maps as well.
TAKER = """
import mmap, os, sys
ours, kept = [], []
for line in sys.stdin:
    kind, mib = line.split()
    size = int(mib) << 20
    if kind == "own":
        ours.append(bytearray(b"x") * size)
    elif kind == "free":
        ours.clear()
    else:
        file = os.memfd_create("shared")
        os.ftruncate(file, size)
        kept.append(mmap.mmap(file, size))
        kept[-1].write(b"x" * size)
        if not os.fork():
            sum(kept[-1][::4096])
            print("forked", flush=True)
            os.read(0, 1)
            os._exit(0)
        continue
    print("done", flush=True)
"""


@contextmanager
def taker():
    argv = [sys.executable, "-c", TAKER]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True) as process:

        def take(kind, mib=0):
            print(kind, mib, file=process.stdin, flush=True)
            assert process.stdout.readline()

        yield process, take


def test_memory_that_was_given_back_meanwhile_counts():
    with taker() as (process, take):
        take("own", 1)
        with watched(lambda: tree(process.pid), 0) as peak:
            take("own", 24)
            readings = peak.readings
            wait_until(lambda: peak.readings > readings + 1)  # a whole one since then
            take("free")
        assert 23 * MIB < peak.extra_bytes < 40 * MIB


def test_shared_pages_count_once_and_the_versions_file_not_at_all():
    with taker() as (process, take):
        take("own", 1)
        with (
            watched(lambda: tree(process.pid), 0) as whole,
            watched(lambda: tree(process.pid), 24 * MIB) as beside,
        ):
            take("shared", 24)
            assert len(tree(process.pid)) == 2
            whole.look()
            beside.look()
        # Writing them went by way of as much of its own.
        assert 24 * MIB <= whole.extra_bytes < 60 * MIB
        assert whole.extra_bytes - beside.extra_bytes <= 24 * MIB
        _, shared = unbacked_bytes(tree(process.pid))
        assert 24 * MIB <= shared < 28 * MIB
        process.stdin.close()


def test_a_process_that_has_ended_has_none():
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
def test_nothing_seen_has_no_percentile(counts):
    assert math.isnan(quantile_bound(counts))


def test_the_last_round_has_what_is_of_all_of_them():
    rounds = [[Figure("GB/s", value, value / 2)] for value in (1.0, 3.0, 2.0)]
    rows = rows_of("receive", [*rounds, [Figure("peak, buckets of 64 MiB", 0.25)]])
    assert rows == [
        ["receive: GB/s", "2.00 (1.00..3.00)", "1.00 (0.50..1.50)", ""],
        ["receive: peak, buckets of 64 MiB", "0.25 (0.25..0.25)", "", "at most 3"],
    ]
