# cython: optimize.use_switch=True
"""`plain_body.py` for the native build: model and stream of a plain JSON object.

Invariant: msgspec would read the same from any body that is accepted. So an accepted body is strict
JSON in printable ASCII without a backslash, has no key of interest twice, no media, no request id
and no typed parts, and is nested at most MAX_DEPTH deep. Every index is below `end`, the body's
size.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DATA, PyUnicode_DecodeASCII
from libc.string cimport memchr, memcmp

from omni_proxy.routing.inspect.requirements cimport Requirements

from omni_proxy.routing.inspect.requirements import MAX_MODEL_CHARS, STREAMING

cdef extern from *:
    """
    /* Printable ASCII except for the backslash; without branches, so that it is vectorized. */
    __attribute__((optimize("O3"))) static int omni_plain(const unsigned char *text, Py_ssize_t size) {
        unsigned char odd = 0;
        for (Py_ssize_t at = 0; at < size; at++)
            odd |= (text[at] < 0x20) | (text[at] > 0x7e) | (text[at] == 0x5c);
        return !odd;
    }
    """
    int omni_plain(const unsigned char *text, Py_ssize_t size) noexcept

READS_BODIES = True
cdef enum:
    MAX_DEPTH = 60
cdef Py_ssize_t _longest = MAX_MODEL_CHARS, _streaming = STREAMING
cdef Requirements _default = Requirements(0)
cdef str _model = ""  # the latest one: most requests name it again


cdef Py_ssize_t _skip_spaces(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    while at < end and text[at] == c" ":
        at += 1
    return at


cdef Py_ssize_t _skip_string(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    """`at`: after the opening quote. Returns the offset after the closing one, or -1."""
    cdef const char *found = <const char *>memchr(text + at, c'"', end - at)
    return -1 if found == NULL else found - text + 1


cdef Py_ssize_t _skip_key(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    """`at`: before a key. Returns the offset after its colon; -1: there is no key."""
    at = _skip_spaces(text, at, end)
    if at >= end or text[at] != c'"':
        return -1
    at = _skip_string(text, at + 1, end)
    if at < 0:
        return -1
    at = _skip_spaces(text, at, end)
    return at + 1 if at < end and text[at] == c":" else -1


cdef Py_ssize_t _skip_digits(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    """Skips at least one digit; -1: there is none."""
    cdef Py_ssize_t start = at
    while at < end and c"0" <= text[at] <= c"9":
        at += 1
    return at if at > start else -1


cdef Py_ssize_t _skip_plain(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    """Skips a number, true, false or null; -1: it is none of these."""
    if text[at] == c"t":
        return at + 4 if end - at >= 4 and memcmp(text + at, b"true", 4) == 0 else -1
    if text[at] == c"f":
        return at + 5 if end - at >= 5 and memcmp(text + at, b"false", 5) == 0 else -1
    if text[at] == c"n":
        return at + 4 if end - at >= 4 and memcmp(text + at, b"null", 4) == 0 else -1
    if text[at] == c"-":
        at += 1
    if at < end and text[at] == c"0":
        at += 1
    else:
        at = _skip_digits(text, at, end)
    if 0 <= at < end and text[at] == c".":
        at = _skip_digits(text, at + 1, end)
    if 0 <= at < end and (text[at] == c"e" or text[at] == c"E"):
        at += 1
        if at < end and (text[at] == c"+" or text[at] == c"-"):
            at += 1
        at = _skip_digits(text, at, end)
    return at


cdef bint _is_type(const char *text, Py_ssize_t at, Py_ssize_t end) noexcept:
    at = _skip_spaces(text, at, end)
    return end - at > 6 and memcmp(text + at, b'"type"', 6) == 0


cdef Py_ssize_t _skip_value(
    const char *text, Py_ssize_t at, Py_ssize_t end, bint *typed
) noexcept:
    """The offset after the value that begins at `at`; -1: it is invalid, or nested too deeply.
    Sets `typed` if an object in it has the key `type`."""
    cdef unsigned long long objects = 0  # a bit for each level: whether it is an object
    cdef int depth = 0
    cdef char char
    while True:
        at = _skip_spaces(text, at, end)
        if at >= end:
            return -1
        char = text[at]
        if char == c"{" or char == c"[":
            at = _skip_spaces(text, at + 1, end)
            if at < end and text[at] == (c"}" if char == c"{" else c"]"):
                at += 1
            else:
                depth += 1
                if depth > MAX_DEPTH:
                    return -1
                objects = objects << 1 | (char == c"{")
                if char == c"{":
                    typed[0] |= _is_type(text, at, end)
                    at = _skip_key(text, at, end)
                    if at < 0:
                        return -1
                continue
        elif char == c'"':
            at = _skip_string(text, at + 1, end)
        else:
            at = _skip_plain(text, at, end)
        if at < 0:
            return -1
        while depth:
            at = _skip_spaces(text, at, end)
            if at >= end:
                return -1
            char = text[at]
            at += 1
            if char == c",":
                if objects & 1:
                    typed[0] |= _is_type(text, at, end)
                    at = _skip_key(text, at, end)
                    if at < 0:
                        return -1
                break
            if char != (c"}" if objects & 1 else c"]"):
                return -1
            objects >>= 1
            depth -= 1
        else:
            return at


cdef bint _is(const char *key, Py_ssize_t size, bytes name) noexcept:
    return size == PyBytes_GET_SIZE(name) and memcmp(key, PyBytes_AS_STRING(name), size) == 0


cdef bint _is_rare(const char *key, Py_ssize_t size) noexcept:
    """Whether the body must be decoded for this key: `request_id`, `rid`, and keys of media."""
    if size == 3:
        return _is(key, size, b"rid")
    if size == 5:
        return _is(key, size, b"image") or _is(key, size, b"audio") or _is(key, size, b"video")
    if size == 6:
        return _is(key, size, b"images") or _is(key, size, b"audios") or _is(key, size, b"videos")
    if size == 10:
        return _is(key, size, b"request_id") or _is(key, size, b"modalities")
    return _is(key, size, b"audio_inputs") or _is(key, size, b"output_modalities")


cdef str _model_at(const char *name, Py_ssize_t size):
    global _model
    if len(_model) != size or memcmp(PyUnicode_DATA(_model), name, size) != 0:
        _model = PyUnicode_DecodeASCII(name, size, NULL)
    return _model


cdef Requirements _new():
    """Requirements with default fields; `Requirements()` is slower, with its twenty arguments."""
    cdef Requirements need = Requirements.__new__(Requirements)
    need.request_id = _default.request_id
    need.named_worker = _default.named_worker
    need.decoded = _default.decoded
    need.affinity_key = _default.affinity_key
    need.version_constraint = _default.version_constraint
    need.rids = _default.rids
    need.adapters_in_large_body = _default.adapters_in_large_body
    need.large_body_class = _default.large_body_class
    need.given_hints = _default.given_hints
    need.ranks_in_large_body = _default.ranks_in_large_body
    need.dp_rank = _default.dp_rank
    need.names_rank_in_body = _default.names_rank_in_body
    need.legs = _default.legs
    need.alias = _default.alias
    need.prediction = _default.prediction
    return need


cpdef Requirements read_plain_body(route, bytes body):
    cdef const char *text = PyBytes_AS_STRING(body)
    cdef Py_ssize_t end = PyBytes_GET_SIZE(body)
    cdef Py_ssize_t at, start, size
    cdef bint stream = False, has_stream = False, has_messages = False, typed = False
    cdef str model = None
    cdef const char *key
    if not omni_plain(<const unsigned char *>text, end):
        return None
    at = _skip_spaces(text, 0, end)
    if at >= end or text[at] != c"{":
        return None
    while True:
        at = _skip_spaces(text, at + 1, end)
        key = text + at + 1
        start = at + 1
        at = _skip_key(text, at, end)
        if at < 0:
            return None
        size = <const char *>memchr(key, c'"', end - start) - key  # a key has a last quote
        start = at = _skip_spaces(text, at, end)
        typed = False
        at = _skip_value(text, at, end, &typed)
        if at < 0:
            return None
        if _is(key, size, b"model"):
            if model is not None or text[start] != c'"' or not 2 < at - start <= 2 + _longest:
                return None
            model = _model_at(text + start + 1, at - start - 2)
        elif _is(key, size, b"stream"):
            if has_stream or not (text[start] == c"t" or text[start] == c"f"):
                return None
            has_stream, stream = True, text[start] == c"t"
        elif _is(key, size, b"messages"):
            if has_messages or typed:
                return None
            has_messages = True
        elif _is_rare(key, size):
            return None
        at = _skip_spaces(text, at, end)
        if at >= end or text[at] != c",":
            break
    if at >= end or text[at] != c"}" or _skip_spaces(text, at + 1, end) != end:
        return None
    cdef Py_ssize_t mask = route.mask
    cdef Requirements need = _new()
    need.mask = mask | _streaming if stream else mask
    need.model = model
    need.stream = stream
    need.pinning = route.pinning
    need.undecoded = body  # for policies that read more fields
    return need
