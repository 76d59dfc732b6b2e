"""Ranks on several machines: the address at which Gloo listens."""

import os
import socket
from contextlib import nullcontext

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
    given = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    monkeypatch.setattr(os, "environ", {"GROUP_WORLD_SIZE": machines, "MASTER_ADDR": master} | given)
    with pytest.raises(UserError, match="GLOO_SOCKET_IFNAME") if fails else nullcontext():
        check_own_address()
