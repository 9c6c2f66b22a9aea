"""Addresses, interfaces and ports of this machine. This module must not import torch."""

import contextlib
import errno
import fcntl
import socket
import struct
import sys

from rlhf.errors import UserError

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915
"""the ioctl of Linux that returns the IPv4 address of an interface"""


def address_towards(host: str) -> str | None:
    """This machine's address on the route to `host`; None without an IPv4 address or a route. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def is_this_host(host: str) -> bool:
    """Whether `host` is a name or an address of this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False
        return True


def interface_of(address: str) -> str | None:
    """The network interface with this address; None if it cannot be determined."""
    names = [name for _, name in socket.if_nameindex()]
    if address.startswith("127."):
        return next((name for name in ("lo", "lo0") if name in names), None)
    return next((name for name in names if _address_of(name) == address), None)


def _address_of(interface: str) -> str | None:
    if sys.platform != "linux":
        return None
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
        except OSError:  # it has no IPv4 address
            return None


def listen(address: str, port: int, option: str) -> socket.socket:
    """A socket that listens only at `address`; port 0 takes any free port. option: the user's option for the port.

    Raises: UserError if the port is taken, with a free one, or if the address is not of this machine.
    """
    try:
        return socket.create_server((address, port))
    except OSError as error:
        address_text = f"{option} {port}" if error.errno in (errno.EADDRINUSE, errno.EACCES) else f"{address}:{port}"
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"{address_text}: is taken on {socket.gethostname()} ({address}); free now: {_free_port(address)}"
            ) from None
        raise UserError(
            f"{address_text}: cannot listen on {socket.gethostname()} ({error.strerror or error}); "
            "expected an address of the first host and a port above 1023"
        ) from None


def _free_port(address: str) -> int:
    with contextlib.closing(socket.create_server((address, 0))) as free:
        return int(free.getsockname()[1])
