"""HTTP/1.1 on the wire: heads judged and cleaned, bodies measured, answers of our own rendered.

Pure: bytes in, values out. llhttp (httptools) is the judge of what is well-formed; the rooms here
add what a proxy must refuse beyond that. Nothing unparsed leaves this room for a worker.
"""
