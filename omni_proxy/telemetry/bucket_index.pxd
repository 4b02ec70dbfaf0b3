cpdef Py_ssize_t bucket_of(tuple bounds, double secs) except -1
