"""`head_template.py` for the native build: the same comparison, without copying the head.

Invariant: no byte at or after `end` is read.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.string cimport memchr, memcmp

Step = tuple  # for annotations


cdef bint _same(const char *text, Py_ssize_t left, bytes other) noexcept:
    """Whether the `left` bytes at `text` begin with `other`."""
    cdef Py_ssize_t size = PyBytes_GET_SIZE(other)
    return size <= left and memcmp(text, PyBytes_AS_STRING(other), size) == 0


cdef bint _holds(const char *text, Py_ssize_t size, bytes forbidden) noexcept:
    cdef Py_ssize_t at
    for at in range(size):  # only control characters and the space are ever forbidden
        if <unsigned char>text[at] <= 0x20 or text[at] == 0x7f:
            if memchr(PyBytes_AS_STRING(forbidden), text[at], PyBytes_GET_SIZE(forbidden)):
                return True
    return False


cdef class HeadTemplate:
    def __init__(self, bytes first not None, tuple steps not None, bytes last not None,
                 *, counted, id_index):
        if not last.endswith(b"\r\n"):
            raise ValueError("a template without the blank line")
        for same, size, forbidden, after in steps:
            if not same or len(same) != size or forbidden.strip(bytes(range(0x21)) + b"\x7f"):
                raise ValueError("not the step of a template")
        self.first = first
        self.steps = steps
        self.last = last
        self.counted = counted
        self.id_index = id_index

    cpdef list match(self, bytes head, bytes length):
        cdef const char *text = PyBytes_AS_STRING(head)
        cdef const char *end = text + PyBytes_GET_SIZE(head)
        cdef const char *stop
        cdef list parts = [self.first]
        cdef bytes same, forbidden, after
        cdef Py_ssize_t size
        for step in self.steps:
            same, _, forbidden, after = <tuple?>step
            if not _same(text, end - text, same):
                return None
            text += PyBytes_GET_SIZE(same)
            stop = <const char *>memchr(text, c"\r", end - text)
            while stop != NULL and stop + 1 < end and stop[1] != c"\n":
                stop = <const char *>memchr(stop + 1, c"\r", end - stop - 1)
            if stop == NULL or stop + 1 >= end:
                stop = end
            size = stop - text
            if not PyBytes_GET_SIZE(forbidden):
                if length is None or size != PyBytes_GET_SIZE(length) or not _same(text, size, length):
                    return None
            elif size == 0 or _holds(text, size, forbidden):
                return None
            elif after is not None:
                parts.append(PyBytes_FromStringAndSize(text, size))
                parts.append(after)
            text = stop + 2 if stop < end else end
        if end - text != PyBytes_GET_SIZE(self.last) or not _same(text, end - text, self.last):
            return None
        return parts
