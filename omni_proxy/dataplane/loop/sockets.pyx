"""`sockets.py` for the native build: recv(2) and send(2) of a non-blocking socket.

Invariant: the descriptor is read from the socket object at each call, so after a close no other
socket with the same number is used by mistake. Must not release the GIL: neither call waits.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.exc cimport PyErr_SetFromErrno
from cpython.object cimport PyObject
from libc.errno cimport EINTR, errno

import _socket

cdef extern from "sys/socket.h" nogil:
    ssize_t c_recv "recv"(int fd, void *buffer, size_t size, int flags)
    ssize_t c_send "send"(int fd, const void *buffer, size_t size, int flags)
    int MSG_NOSIGNAL

cdef extern from *:
    """
    /* The first fields of CPython's PySocketSockObject, unchanged since 2.x. */
    typedef struct { PyObject_HEAD int sock_fd; } omni_socket;
    """
    ctypedef struct omni_socket:
        int sock_fd

cdef enum:
    ROOM = 65536

cdef char room[ROOM]  # only one thread reads, and copies the bytes before the next read


cdef class Receiver:
    cdef object sock

    def __cinit__(self, sock):
        if not isinstance(sock, _socket.socket):
            raise TypeError("not a socket")
        self.sock = sock

    def receive(self, Py_ssize_t size, int flags=0):
        cdef ssize_t received
        if size < 0:
            raise ValueError("negative buffersize in recv")
        if size > ROOM:
            return self.sock.recv(size, flags)
        while True:
            received = c_recv((<omni_socket *><PyObject *>self.sock).sock_fd, room, size, flags)
            if received >= 0:
                return PyBytes_FromStringAndSize(room, received)
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)


cdef class Sender:
    cdef object sock

    def __cinit__(self, sock):
        if not isinstance(sock, _socket.socket):
            raise TypeError("not a socket")
        self.sock = sock

    def send(self, chunk):
        cdef Py_buffer view
        cdef ssize_t sent
        cdef int fd = (<omni_socket *><PyObject *>self.sock).sock_fd
        PyObject_GetBuffer(chunk, &view, PyBUF_SIMPLE)
        try:
            sent = c_send(fd, view.buf, view.len, MSG_NOSIGNAL)
            while sent < 0 and errno == EINTR:
                sent = c_send(fd, view.buf, view.len, MSG_NOSIGNAL)
            if sent < 0:
                PyErr_SetFromErrno(OSError)
            return sent
        finally:
            PyBuffer_Release(&view)


def receiver(sock):
    return Receiver(sock).receive  # a bound method: calling an object would be slower


def sender(sock):
    return Sender(sock).send
