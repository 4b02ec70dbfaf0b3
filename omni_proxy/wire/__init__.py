"""HTTP/1.1 on the wire: heads parsed and cleaned, bodies framed, local replies rendered.

Pure: bytes in, values out. llhttp (httptools) parses; the modules here also refuse what llhttp
accepts but a proxy must not forward. Invariant: nothing unparsed is sent to a worker.
"""
