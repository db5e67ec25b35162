"""Says whether an address is reachable from this machine alone."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host`, an address or a name, is one of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
