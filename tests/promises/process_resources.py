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
        every = [pid for root in pids for pid in tree(root)]
        self.children = len(every)
        self.threads = sum(len(_listed(f"/proc/{pid}/task")) for pid in every)
        self.kinds = Counter(kind for pid in every for kind in _files(pid))
        self.sockets = self.kinds["socket:"]
        self.files = self.kinds.total() - self.sockets
        self.mib = sum(_pss_mib(pid, "Pss_Anon") for pid in every)
        self.shared_mib = sum(_pss_mib(pid, "Pss_Shmem") for pid in every)

    def __repr__(self):
        return repr(vars(self))

    def beyond(self, before, slack):
        """What has grown by more than its slack: name, what it was, what it is."""
        rows = [(name, getattr(before, name), getattr(self, name)) for name in slack]
        return [(name, was, now) for name, was, now in rows if now > was + slack[name]]


def tree(pid):
    found = [pid]
    for each in found:
        for task in _listed(f"/proc/{each}/task"):
            try:
                text = Path(f"/proc/{each}/task/{task}/children").read_text()
            except OSError:
                continue
            found.extend(map(int, text.split()))
    return found


def _listed(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _files(pid):
    """Without connections that their client has closed: a replica's server keeps its side of them
    until their keep-alive has run out."""
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
    found = re.search(rf"^{kind}: +(\d+) kB", text, re.MULTILINE)
    return int(found[1]) / 1024 if found else 0.0
