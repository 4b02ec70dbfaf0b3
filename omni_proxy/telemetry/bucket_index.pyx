"""`bucket_index.py` for the native build: the same bisection over numbers.

Invariant: every index is below the number of bounds.
"""


cpdef Py_ssize_t bucket_of(tuple bounds, double secs) except -1:
    cdef Py_ssize_t low = 0, high = len(bounds), middle
    while low < high:
        middle = (low + high) >> 1
        if <double>bounds[middle] < secs:
            low = middle + 1
        else:
            high = middle
    return low
