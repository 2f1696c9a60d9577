"""Connections: counted by address, for IPv6 by network, without that limit for proxies; read in turns."""

import asyncio
from ipaddress import ip_network
from typing import Any

from meshwright.serve.http.connections import Connections, ReadInTurns, ReadTurns


def test_an_ipv6_network_is_one_client_unless_it_is_a_proxys() -> None:
    connections = Connections(100, 8, proxies=[ip_network("2001:db8::/32")])
    clients, proxies = ([f"{prefix}::{number}" for number in range(9)] for prefix in ("2002:1", "2001:db8:1"))
    assert [connections.open(address) for address in clients] == [True] * 8 + [False]
    assert all(connections.open(address) for address in proxies)
    connections.close(clients[0])
    assert connections.open("2002:1::ffff")


class Transport:
    """A transport that knows whether it reads."""

    is_reading = True

    def pause_reading(self) -> None:
        self.is_reading = False

    def resume_reading(self) -> None:
        self.is_reading = True


def test_paused_connections_go_on_a_few_in_each_turn_of_the_loop():
    transports: list[Any] = [Transport() for _ in range(10)]
    numbers_reading = list[int]()

    async def resume_all() -> None:
        turns = ReadTurns()
        flows = [ReadInTurns(transport, turns) for transport in transports]
        for flow in flows:
            flow.pause_reading()
            flow.resume_reading()
        flows[-1].pause_reading()  # again, before its turn
        for _ in range(4):
            numbers_reading.append(sum(transport.is_reading for transport in transports))
            await asyncio.sleep(0)

    asyncio.run(resume_all())
    assert numbers_reading == [0, 4, 8, 9]
    assert not transports[-1].is_reading
