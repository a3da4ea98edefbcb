"""What a real process holds of the host's RAM, as the kernel says it: the meter's counterpart on any machine."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..errors import NotSupported
from ..language import tr

_NAMES = {"VmRSS": "rss", "VmHWM": "peak_rss", "RssAnon": "anonymous", "RssFile": "mapped", "RssShmem": "shared"}


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of /proc/PID/status (proc_pid_status(5)).

    rss: resident pages. peak_rss: the most there were (VmHWM). anonymous: what only this process has, and nothing but
    its end gives back. mapped: pages of files (libraries, memory-mapped weights), which the kernel may drop. shared: of
    /dev/shm.
    """

    rss: int
    peak_rss: int
    anonymous: int
    mapped: int
    shared: int


def process_memory(pid: int | str = "self") -> ProcessMemory:
    """What the process holds now. NotSupported on a system without /proc."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            found = {name: int(rest.split()[0]) * 1024 for name, _, rest in (x.partition(":") for x in lines)
                     if name in _NAMES}  # fmt: skip
    except FileNotFoundError as error:
        raise NotSupported(
            tr(ko="/proc이 있는 Linux에서만 잴 수 있다.", en="only Linux, which has /proc, says what a process holds.")
        ) from error
    return ProcessMemory(**{_NAMES[name]: value for name, value in found.items()})


def is_file_backed(address: int) -> bool:
    """Whether the memory at an address of this process is a file's (proc_pid_maps(5)); False without /proc."""
    if not os.path.exists("/proc/self/maps"):
        return False
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            low, high = line.split(" ", 1)[0].split("-")
            if int(low, 16) <= address < int(high, 16):
                path = line.split(maxsplit=5)[5:]
                return bool(path) and path[0].startswith("/") and not path[0].startswith("/dev/shm")
    return False


@dataclass
class HostGrowth:
    """Bytes by which a block of code raised what the process holds: its highest, and at its end.

    peak_rss is the kernel's own high-water mark. peak_anonymous was sampled: a peak shorter than a millisecond may be
    missed.
    """

    peak_rss: int = 0
    peak_anonymous: int = 0
    rss: int = 0
    anonymous: int = 0
    mapped: int = 0


@contextmanager
def host_growth(interval_s: float = 0.001) -> Iterator[HostGrowth]:
    """Measure a block: the result is filled in at its end. The high-water mark of this process is set back."""
    grown, before = HostGrowth(), process_memory()
    with open("/proc/self/clear_refs", "w", encoding="ascii") as marks:
        marks.write("5")  # "reset the peak resident set size" (proc_pid_clear_refs(5))
    highest, done = before.anonymous, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.is_set():
            highest = max(highest, process_memory(os.getpid()).anonymous)
            time.sleep(interval_s)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()
        after = process_memory()
        grown.peak_rss = after.peak_rss - before.rss
        grown.peak_anonymous = max(highest, after.anonymous) - before.anonymous
        grown.rss, grown.anonymous = after.rss - before.rss, after.anonymous - before.anonymous
        grown.mapped = after.mapped - before.mapped
