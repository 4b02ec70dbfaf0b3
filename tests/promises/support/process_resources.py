"""Resources of processes: files, threads, children and memory, as the kernel counts them."""

from __future__ import annotations

import os
import re
from collections import Counter
from contextlib import suppress
from pathlib import Path


class ProcessResources:
    """Resources of processes and their descendants: files, threads, children, private and shared
    memory."""

    def __init__(self, pids):
        all_pids = [pid for root in pids for pid in tree(root)]
        self.children = len(all_pids)
        self.threads = sum(len(_listed(f"/proc/{pid}/task")) for pid in all_pids)
        self.kinds = Counter(kind for pid in all_pids for kind in _files(pid))
        self.sockets = self.kinds["socket:"]
        self.files = self.kinds.total() - self.sockets
        self.mib = sum(_pss_mib(pid, "Pss_Anon") for pid in all_pids)
        self.shared_mib = sum(_pss_mib(pid, "Pss_Shmem") for pid in all_pids)

    def __repr__(self):
        return repr(vars(self))

    def beyond(self, before, slack):
        """Returns (name, before, now) of each resource that has grown by more than its slack."""
        rows = [(name, getattr(before, name), getattr(self, name)) for name in slack]
        return [(name, was, now) for name, was, now in rows if now > was + slack[name]]


def tree(pid):
    pids = [pid]
    for parent in pids:
        for task in _listed(f"/proc/{parent}/task"):
            try:
                text = Path(f"/proc/{parent}/task/{task}/children").read_text()
            except OSError:
                continue
            pids.extend(map(int, text.split()))
    return pids


def _listed(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _files(pid):
    """Yields open files, except connections that their client has closed: a replica's server keeps
    its side of them until its keep-alive timeout."""
    closed = {
        f"socket:[{fields[9]}]"
        for fields in map(str.split, Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:])
        if fields[3] == "08"
    }
    for number in _listed(f"/proc/{pid}/fd"):
        with suppress(OSError):
            name = os.readlink(f"/proc/{pid}/fd/{number}")
            if name not in closed:
                yield name.partition("[")[0]


def _pss_mib(pid, kind):
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    match = re.search(rf"^{kind}: +(\d+) kB", text, re.MULTILINE)
    return int(match[1]) / 1024 if match else 0.0
