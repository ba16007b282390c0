"""Hosts as they are bound and as they are named to others."""

from ipaddress import ip_address


def is_anywhere(host: str) -> bool:
    """Whether it means all addresses of a machine, and so leads nobody to it: 0.0.0.0, ::, "", 0."""
    bare = host.removeprefix("[").removesuffix("]")
    if bare in ("", "*", "0"):
        return True
    try:
        address = ip_address(bare)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_unspecified or (mapped is not None and mapped.is_unspecified)


def in_url(host: str) -> str:
    """As it stands before the port: IPv6 in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
