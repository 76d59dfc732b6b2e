"""Ranks on several machines: the address at which Gloo listens."""

import socket

import pytest

from config import UserError
from infra.ranks import check_own_address


@pytest.mark.parametrize(
    "own, master, machines, interface, fails",
    [
        ("127.0.1.1", "10.0.0.1", "2", None, True),
        ("127.0.1.1", "10.0.0.1", "2", "eth0", False),
        ("127.0.1.1", "10.0.0.1", "1", None, False),
        ("127.0.1.1", "127.0.0.1", "2", None, False),
        ("127.0.1.1", "node-0", "2", None, True),  # on node-0 itself
        ("10.0.0.2", "10.0.0.1", "2", None, False),
    ],
)
def test_a_name_that_only_its_own_machine_can_reach(own, master, machines, interface, fails, monkeypatch):
    monkeypatch.setattr(socket, "gethostbyname", lambda name: own)
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    if fails:
        with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME"):
            check_own_address()
    else:
        check_own_address()
