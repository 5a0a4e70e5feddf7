"""How the ranks find rank 0's server when a coordinator starts."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, Store, TCPStore

from landfall.coord.base import StoreLostError
from landfall.coord.connections import CONNECT_S, Connections
from landfall.coord.solo import new_run_id
from landfall.errors import DeadlineError, LandfallError, UsageError

RUN_ID_KEY = "landfall/run_id"


@dataclass(frozen=True)
class Met:
    """The way to the server, and on rank 0 the server."""

    run_id: str
    connections: Connections
    server: TCPStore | None = None


class _Published(msgspec.Struct):
    run_id: str
    hosts: list[str]
    port: int


def meet_through(rendezvous: Store, rank: int, deadline_s: float) -> Met:
    """Rank 0 starts a server and publishes it in ``rendezvous``; the others go there."""
    start = rendezvous.add(f"coordinator/starts/{rank}", 1)
    key = f"coordinator/{start}"
    if rank == 0:
        met = _serve(0)
        published = _Published(met.run_id, own_hosts(), met.connections.port)
        rendezvous.set(key, msgspec.json.encode(published).decode())
        return met
    until = time.monotonic() + deadline_s
    try:
        rendezvous.wait([key], timedelta(seconds=deadline_s))
    except DistStoreError:
        raise DeadlineError(
            f"Rank {rank} waited {deadline_s:g} s in vain for rank 0 to start the message store",
            missing=(0,),
            where=f"rank {rank} on {socket.gethostname()}",
            do="look at the log of rank 0",
        ) from None
    published = msgspec.json.decode(rendezvous.get(key), type=_Published)
    return _reach(published.hosts, published.port, published.run_id, rank, until)


def meet_at(host: str, port: int, rank: int, deadline_s: float) -> Met:
    """Rank 0 starts a server on ``port``; the others go to ``host:port``."""
    if rank == 0:
        return _serve(port)
    return _reach([host], port, None, rank, time.monotonic() + deadline_s)


def own_hosts() -> list[str]:
    """Names and addresses of this machine, the one that others are likeliest to reach first."""
    hosts: list[str] = []
    master = os.environ.get("MASTER_ADDR", "")
    if master:
        # The others reach MASTER_ADDR, and an address from which we reach it is in the same network.
        hosts += [master] if _is_own(master) else []
        hosts += _address_towards(master)
    hosts.append(socket.gethostname())
    return list(dict.fromkeys(hosts))


def _serve(port: int) -> Met:
    try:
        server = TCPStore(
            "localhost", port, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
        )
    except DistNetworkError as error:
        raise UsageError(
            f"Rank 0 can't listen on port {port or '(any)'}",
            where=f"rank 0 on {socket.gethostname()}",
            got=str(error).splitlines()[0],
            do="end the process that holds the port, or choose another port",
        ) from error
    run_id = new_run_id()
    server.set(RUN_ID_KEY, run_id)
    return Met(run_id, Connections("localhost", server.port), server)


def _reach(hosts: list[str], port: int, run_id: str | None, rank: int, until: float) -> Met:
    """The first of ``hosts`` where the server of this run answers."""
    failures: dict[str, str] = {}
    while True:
        for host in hosts:
            connections = Connections(host, port)
            limit_s = min(CONNECT_S, max(until - time.monotonic(), 0.1))
            try:
                found = connections.call(lambda store: store.get(RUN_ID_KEY), limit_s).decode()
            except (StoreLostError, DistStoreError) as error:
                failures[host] = str(error).replace("\n", ";")
                continue
            if run_id in (None, found):
                return Met(found, connections)
            connections.close()
            failures[host] = f"another run ({found}) listens there"
        if time.monotonic() >= until:
            break
        time.sleep(0.1)
    raise LandfallError(
        f"Rank {rank} can't reach the message store of rank 0",
        where=f"rank {rank} on {socket.gethostname()}",
        got="; ".join(f"{host}:{port}: {failure}" for host, failure in failures.items()),
        expected="a TCP connection to rank 0 at one of these addresses",
        do="see whether rank 0 still runs, open TCP between the machines, or set MASTER_ADDR to an address "
        "of rank 0's machine that the others reach",
    )


def _is_own(host: str) -> bool:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _address_towards(host: str) -> list[str]:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing: it only chooses the route
            return [probe.getsockname()[0]]
    except OSError:
        return []
