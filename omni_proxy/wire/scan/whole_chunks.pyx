"""`whole_chunks.py` for the native build. Invariant: no byte at or after `end` is read."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

READS_CHUNKS = True
cdef enum:
    MAX_DIGITS = 7  # so that no sum can overflow


cpdef bint are_whole_chunks(bytes piece) noexcept:
    if piece is None:
        return False
    cdef const char *text = PyBytes_AS_STRING(piece)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(piece)
    cdef Py_ssize_t at = 0, size, start
    while at < end:
        size, start = 0, at
        while at < end:
            if c"0" <= text[at] <= c"9":
                size = size * 16 + text[at] - c"0"
            elif c"a" <= text[at] | 0x20 <= c"f":
                size = size * 16 + (text[at] | 0x20) - c"a" + 10
            else:
                break
            at += 1
            if at - start > MAX_DIGITS:
                return False
        # A line end, `size` bytes, a line end.
        if size == 0 or end - at < size + 4 or text[at] != c"\r" or text[at + 1] != c"\n":
            return False
        at += 2 + size
        if text[at] != c"\r" or text[at + 1] != c"\n":
            return False
        at += 2
    return end > 0
