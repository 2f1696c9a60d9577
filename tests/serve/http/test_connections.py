"""Counts of open connections: by address, for IPv6 by network, and without that limit for proxies."""

from ipaddress import ip_network

from meshwright.serve.http.connections import Connections


def test_an_ipv6_network_is_one_client_unless_it_is_a_proxys() -> None:
    connections = Connections(100, 8, proxies=[ip_network("2001:db8::/32")])
    clients, proxies = ([f"{prefix}::{number}" for number in range(9)] for prefix in ("2002:1", "2001:db8:1"))
    assert [connections.open(address) for address in clients] == [True] * 8 + [False]
    assert all(connections.open(address) for address in proxies)
    connections.close(clients[0])
    assert connections.open("2002:1::ffff")
