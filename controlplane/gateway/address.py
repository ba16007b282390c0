"""Where others reach this gateway: what it was told, what it is bound to, or whence it reaches the
control plane."""

import asyncio
import re
import secrets
import socket
from ipaddress import ip_address
from typing import Final
from urllib.parse import urlsplit

import structlog

from controlplane.gateway.settings import Settings
from workers.core.hosts import in_url, is_anywhere

log = structlog.get_logger(__name__)

RESOLVE_SECONDS: Final = 2.0
_USUAL_HOSTS = ("127.0.0.1", "::1", "localhost")


def bound_url(settings: Settings, port: int) -> str:
    return f"http://{in_url(settings.host)}:{port}"


def own_id(host: str, port: int) -> str:
    """For one that is given none: no other gateway's, and the same after a restart."""
    parts = ["gw", socket.gethostname()[:48]]
    if not is_anywhere(host) and host not in _USUAL_HOSTS:
        parts.append(host[:48])
    parts.append(str(port) if port else secrets.token_hex(4))
    return re.sub(r"[^A-Za-z0-9._-]", "-", "-".join(parts))


async def announced_url(settings: Settings, port: int) -> str:
    """For the control plane, which asks it and shows it. One that is bound to all addresses names
    the one from which it reaches the control plane, else the machine's name, with a warning."""
    if settings.advertise:
        return settings.advertise.rstrip("/")
    if not is_anywhere(settings.host):
        return bound_url(settings, port)
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            host = await _towards(settings.control_plane, settings.host)
    except (OSError, TimeoutError) as error:
        url = f"http://{socket.gethostname()}:{port}"
        log.warning(
            "address_unknown", host=settings.host, control_plane=settings.control_plane,
            error=str(error) or type(error).__name__, announced=url,
            way_out="Say how it is reached: --advertise http://HOST:PORT",
        )  # fmt: skip
        return url
    return f"http://{in_url(host)}:{port}"


async def _towards(url: str, bound: str) -> str:
    """The address of this machine from which packets go there; none is sent. Raises OSError."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    family = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}.get(bound, socket.AF_UNSPEC)  # noqa: S104 - compared, not bound
    found = await asyncio.get_running_loop().getaddrinfo(
        parts.hostname, port, family=family, type=socket.SOCK_DGRAM
    )
    for kind, _, _, _, address in found:
        with socket.socket(kind, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            host = str(probe.getsockname()[0])
        if not ip_address(host).is_link_local:
            return host
    raise OSError(f"no address of {bound} leads to {url}")
