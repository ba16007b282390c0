"""Writes that go out at once.

The event loop keeps what is written to a transport until the callbacks that are due have all run; a
first token would wait for the work of other requests, and a leg for the books kept about it.
"""

import asyncio
import os
from collections.abc import Callable

Writer = Callable[[bytes], object]


def writer_of(transport: asyncio.Transport) -> Writer:
    """As `transport.write`, but the system gets the bytes before it returns, where it takes them
    and nothing is queued before them. With TLS it is `transport.write`."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.get_extra_info("ssl_object") is not None:
        return transport.write
    number, queued, is_closing = (
        sock.fileno(), transport.get_write_buffer_size, transport.is_closing,
    )  # fmt: skip
    later, now = transport.write, os.write

    def write(data: bytes) -> None:
        if is_closing() or queued() or not data:
            later(data)
            return
        try:
            sent = now(number, data)
        except OSError:  # full, or broken: the transport knows what to do
            sent = 0
        if sent < len(data):
            later(data[sent:] if sent else data)

    return write
