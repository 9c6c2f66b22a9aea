"""Addresses, interfaces and ports of this machine. This module must not import torch."""

import contextlib
import errno
import socket

import psutil

from rlhf.errors import UserError

LOOPBACK = "127.0.0.1"


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
    address = LOOPBACK if address.startswith("127.") else address
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, entries in interfaces if any(entry.address == address for entry in entries)), None)


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
