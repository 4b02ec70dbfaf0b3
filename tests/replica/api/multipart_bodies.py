"""Multipart bodies as clients send them."""

BOUNDARY = "----sound7MA4"
CONTENT_TYPE = f"multipart/form-data; boundary={BOUNDARY}"


def form(fields, files=()):
    """A form with text `fields` and `files`, which are (name, filename, content type, bytes)."""
    parts = []
    for name, value in fields.items():
        head = f'Content-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(head.encode() + value.encode())
    for name, filename, content_type, data in files:
        head = f'Content-Disposition: form-data; name="{name}"; filename="{filename}"\r\n'
        parts.append((head + f"Content-Type: {content_type}\r\n\r\n").encode() + data)
    lines = (b"--" + BOUNDARY.encode() + b"\r\n" + part + b"\r\n" for part in parts)
    return b"".join(lines) + b"--" + BOUNDARY.encode() + b"--\r\n"
