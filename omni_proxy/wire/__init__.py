"""HTTP/1.1 on the wire: heads parsed and cleaned, bodies framed, local replies rendered.

Pure: bytes in, values out. llhttp (httptools) decides what is well-formed; the modules here add
what a proxy must refuse beyond that. Nothing unparsed is sent to a worker.
"""
