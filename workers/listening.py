"""Ending an asyncio server without losing what was on its way in."""

import asyncio
import socket
from errno import EADDRNOTAVAIL


def is_hosts_fault(error: OSError) -> bool:
    """Whether another port would not help: the address is none of this machine's, or no name of one."""
    return isinstance(error, socket.gaierror) or error.errno == EADDRNOTAVAIL


async def stop_listening(server: asyncio.Server) -> None:
    """Accept nothing more. What asyncio's own loop has accepted already becomes a connection first:
    once the server is closed it would be dropped unclosed."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, asyncio.SelectorEventLoop):
        for sock in server.sockets:
            loop.remove_reader(sock.fileno())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    server.close()
