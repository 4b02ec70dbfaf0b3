"""`token_id_text.py` for the native build: commas are counted sixteen bytes at a time.

Invariant: every index is below the size of the text, or of `_before`, which has one count per part.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr

cdef extern from *:
    """
    __attribute__((optimize("O3"))) static Py_ssize_t omni_commas(const char *text, int size) {
        unsigned char count = 0;  /* of at most PART bytes */
        for (int offset = 0; offset < size; offset++)
            count += text[offset] == ',';
        return count;
    }
    """
    Py_ssize_t omni_commas(const char *text, int size) noexcept

COMMA = b","
cdef enum:
    PART = 128  # bytes; a count of its commas fits in a byte


def without_spaces(bytes data not None):
    cdef Py_ssize_t offset, size = PyBytes_GET_SIZE(data), length = 0
    cdef bytes out = PyBytes_FromStringAndSize(NULL, size)
    cdef const char *text = PyBytes_AS_STRING(data)
    cdef char *target = PyBytes_AS_STRING(out)
    for offset in range(size):
        target[length] = text[offset]
        length += text[offset] != c" "
    return out[:length]


cdef class TokenIdText:
    cdef readonly bytes data
    cdef readonly object view
    cdef readonly Py_ssize_t tokens
    cdef uint32_t *_before  # commas before each part
    cdef Py_ssize_t _parts

    def __cinit__(self, bytes data not None, tokens=None):
        cdef const char *text = PyBytes_AS_STRING(data)
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data), part, count = 0
        self.data = data
        self.view = memoryview(data)
        self._parts = (size + PART - 1) // PART
        self._before = <uint32_t *>malloc((self._parts + 1) * sizeof(uint32_t))
        if self._before == NULL:
            raise MemoryError
        for part in range(self._parts):
            self._before[part] = <uint32_t>count
            count += omni_commas(text + part * PART, <int>min(PART, size - part * PART))
        self.tokens = count

    def __dealloc__(self):
        free(self._before)

    def end_of(self, Py_ssize_t tokens):
        cdef const char *text = PyBytes_AS_STRING(self.data)
        cdef const char *end = text + PyBytes_GET_SIZE(self.data)
        cdef const char *comma
        cdef Py_ssize_t low = 0, high = self._parts, middle, remaining
        if tokens >= self.tokens:
            return PyBytes_GET_SIZE(self.data)
        if tokens < 0:
            raise ValueError("fewer than no ids")
        while high - low > 1:  # find the last part with at most `tokens` commas before it
            middle = (low + high) >> 1
            if self._before[middle] <= tokens:
                low = middle
            else:
                high = middle
        remaining = tokens - self._before[low]
        comma = <const char *>memchr(text + low * PART, c",", end - text - low * PART)
        while remaining and comma != NULL:
            comma = <const char *>memchr(comma + 1, c",", end - comma - 1)
            remaining -= 1
        return end - text if comma == NULL else comma - text
