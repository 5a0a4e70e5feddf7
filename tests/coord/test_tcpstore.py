"""The coordinator over real processes: who is missing is named, and no wait outlives its deadline."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from landfall.coord import meeting, tcpstore
from landfall.coord.base import StoreLostError
from landfall.coord.tcpstore import PART_BYTES, TCPStoreCoordinator
from landfall.errors import DeadlineError, LandfallError, UsageError
from landfall.testing.procs import free_port, run_ranks, start_ranks


def join() -> TCPStoreCoordinator:
    dist.init_process_group("gloo")
    return TCPStoreCoordinator.from_process_group(deadline_s=60)


def wait_for(path: Path) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, f"{path} did not appear"
        time.sleep(0.01)


def exchange_names() -> tuple[str, dict[int, bytes], bytes]:
    coordinator = join()
    messages = coordinator.exchange("name", f"rank {coordinator.rank}".encode(), 60)
    decision = coordinator.from_rank0("decision", b"write" if coordinator.rank == 0 else None, 60)
    assert coordinator.close() == ()
    return coordinator.run_id, messages, decision


def test_messages_posted_by_all_reach_all() -> None:
    results = run_ranks(exchange_names, 3)
    assert len({run_id for run_id, _, _ in results}) == 1
    for _, messages, decision in results:
        assert messages == {0: b"rank 0", 1: b"rank 1", 2: b"rank 2"}
        assert decision == b"write"


def start_twice() -> list[str]:
    first, second = join(), TCPStoreCoordinator.from_process_group(60)
    second.exchange("ready", b"", 60)
    first.close()
    second.close()
    return [first.run_id, second.run_id]


def test_a_second_start_meets_the_second_start_of_the_others() -> None:
    ours, theirs = run_ranks(start_twice, 2)
    assert ours == theirs
    assert ours[0] != ours[1]


def post_late() -> object:
    coordinator = join()
    if coordinator.rank == 1:
        coordinator.collect("you may post now", [0], 60)
        coordinator.post("late", b"here I am")
    missing = None
    if coordinator.rank == 0:
        with pytest.raises(DeadlineError) as caught:
            coordinator.collect("late", range(3), 0.3)
        missing = caught.value.missing
        coordinator.post("you may post now", b"")
        assert coordinator.collect("late", [1], 60) == {1: b"here I am"}
    if coordinator.rank == 2:
        coordinator.post("late", b"on time")
    coordinator.close()
    return missing


def test_a_late_rank_is_named_and_collected_when_it_posts() -> None:
    assert run_ranks(post_late, 3)[0] == (0, 1)


def collect_with_a_dead_rank(folder: str) -> object:
    coordinator = join()
    (Path(folder) / f"up{coordinator.rank}").touch()
    if coordinator.rank == 2:
        time.sleep(600)
    wait_for(Path(folder) / "killed")
    with pytest.raises(DeadlineError) as caught:
        coordinator.exchange("report", b"", 0.5)
    text = str(caught.value)
    coordinator.post("next", bytes([coordinator.rank]))
    messages = coordinator.collect("next", [0, 1], 60)
    coordinator.close(deadline_s=1)
    return caught.value.missing, text, messages


def test_a_killed_rank_is_named_and_the_others_go_on(tmp_path: Path) -> None:
    with start_ranks(collect_with_a_dead_rank, 3, str(tmp_path)) as ranks:
        for rank in range(3):
            wait_for(tmp_path / f"up{rank}")
        ranks.kill(2)
        (tmp_path / "killed").touch()
        assert ranks.exit_codes() == [0, 0, -9]
        for rank in (0, 1):
            missing, text, messages = ranks.result(rank)
            assert missing == (2,)
            assert "no answer from rank 2" in text and "'report'" in text
            assert messages == {0: b"\0", 1: b"\1"}


def call_after_rank0_left(folder: str) -> object:
    coordinator = join()
    tcpstore.GRACE_S = 2.0
    (Path(folder) / f"up{coordinator.rank}").touch()
    if coordinator.rank == 0:
        time.sleep(600)
    started = time.monotonic()
    with pytest.raises(StoreLostError) as caught:
        coordinator.collect("never", [0], float(os.environ["DEADLINE_S"]))
    waited_s = time.monotonic() - started
    if os.environ["THEN_POST"] == "yes":
        with pytest.raises(StoreLostError):
            coordinator.post("after", b"")
    return str(caught.value), waited_s


def test_a_killed_rank0_is_named_at_once(tmp_path: Path) -> None:
    environment = {"DEADLINE_S": "100", "THEN_POST": "yes"}
    with start_ranks(call_after_rank0_left, 2, str(tmp_path), backend_env=environment) as ranks:
        wait_for(tmp_path / "up1")
        ranks.kill(0)
        assert ranks.exit_codes(60) == [-9, 0]
        text, waited_s = ranks.result(1)
    assert "Rank 0" in text and "look at the log of rank 0" in text
    assert waited_s < 60


def test_a_frozen_rank0_is_named_soon_after_the_deadline(tmp_path: Path) -> None:
    environment = {"DEADLINE_S": "1", "THEN_POST": "no"}
    with start_ranks(call_after_rank0_left, 2, str(tmp_path), backend_env=environment) as ranks:
        wait_for(tmp_path / "up1")
        ranks.stop(0)
        ranks.processes[1].join(60)
        text, waited_s = ranks.result(1)
    assert "Rank 0" in text and "does not answer" in text
    assert waited_s < 15


def alone(world_size: int) -> TCPStoreCoordinator:
    """The coordinator of rank 0, whose other ranks this test plays by changing its number."""
    return TCPStoreCoordinator.start(0, world_size, rendezvous=HashStore())


def post_as(coordinator: TCPStoreCoordinator, rank: int, key: str, payload: bytes) -> None:
    before, coordinator.rank = coordinator.rank, rank
    coordinator.post(key, payload)
    coordinator.rank = before


@pytest.mark.parametrize("num_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_messages_longer_than_the_store_allows_arrive_whole(num_bytes: int) -> None:
    coordinator = alone(1)
    payload = os.urandom(num_bytes)
    coordinator.post("big", payload)
    assert coordinator.collect("big", [0], 30) == {0: payload}


@pytest.mark.parametrize("num_bytes", [3, 3 * PART_BYTES])
def test_a_dropped_message_is_missing_and_leaves_nothing_behind(num_bytes: int) -> None:
    coordinator = alone(1)
    keys_before = coordinator._server.num_keys()
    coordinator.post("plan", bytes(num_bytes))
    coordinator.drop("plan")
    coordinator.drop("plan")
    assert coordinator._server.num_keys() == keys_before
    with pytest.raises(DeadlineError):
        coordinator.collect("plan", [0], 0.1)
    coordinator.post("plan", b"again")
    assert coordinator.collect("plan", [0], 30) == {0: b"again"}


def test_a_blocked_wait_in_one_thread_lets_another_post() -> None:
    coordinator = alone(1)
    collected: list[dict[int, bytes]] = []
    waiter = threading.Thread(target=lambda: collected.append(coordinator.collect("from main", [0], 60)))
    waiter.start()
    for number in range(100):
        coordinator.post(f"{number}", b"busy")
        assert coordinator.collect(f"{number}", [0], 30) == {0: b"busy"}
    assert waiter.is_alive()
    coordinator.post("from main", b"go")
    waiter.join(60)
    assert collected == [{0: b"go"}]


def test_missing_ranks_among_thousands_are_named_exactly() -> None:
    coordinator = alone(5000)
    absent = {17, 18, 4095, 4096, 4999}
    for rank in set(range(5000)) - absent:
        post_as(coordinator, rank, "report", b"x" * 200)
    with pytest.raises(DeadlineError) as caught:
        coordinator.collect("report", range(5000), 0.2)
    assert set(caught.value.missing) == absent
    for rank in absent:
        post_as(coordinator, rank, "report", b"late")
    started = time.monotonic()
    messages = coordinator.collect("report", range(5000), 30)
    assert time.monotonic() - started < 5
    assert list(messages) == list(range(5000))
    assert {rank for rank, message in messages.items() if message == b"late"} == absent


def test_a_broken_connection_is_replaced_while_the_server_lives() -> None:
    coordinator = alone(1)
    coordinator.post("any", b"")
    num_calls = 0

    def break_once(store: dist.TCPStore) -> str:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            store.set("too long", bytes(9 << 20))  # type: ignore[arg-type]  # the server hangs up
        store.check(["any"])
        return "answered"

    assert coordinator._connections.call(break_once, 30) == "answered"
    assert num_calls == 2


def test_nobody_at_the_address_is_an_error_that_names_rank_and_address() -> None:
    port = free_port()
    started = time.monotonic()
    with pytest.raises(LandfallError, match=rf"(?s)Rank 3.*localhost:{port}"):
        TCPStoreCoordinator.start(3, 4, address=("localhost", port), deadline_s=0.5)
    assert time.monotonic() - started < 10


def test_a_rank0_that_never_starts_is_named() -> None:
    with pytest.raises(DeadlineError, match="Rank 1 waited") as caught:
        TCPStoreCoordinator.start(1, 2, rendezvous=HashStore(), deadline_s=0.5)
    assert caught.value.missing == (0,)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    port = free_port()
    TCPStoreCoordinator.start(0, 1, address=("localhost", port)).close()
    holder = TCPStoreCoordinator.start(0, 1, address=("localhost", port))
    with pytest.raises(UsageError, match=f"port {port}"):
        TCPStoreCoordinator.start(0, 1, address=("localhost", port))
    holder.close()


def test_an_explicit_address_joins_without_a_rendezvous() -> None:
    port = free_port()
    first = TCPStoreCoordinator.start(0, 2, address=("localhost", port))
    second = TCPStoreCoordinator.start(1, 2, address=("localhost", port))
    second.post("hello", b"from 1")
    assert first.collect("hello", [1], 30) == {1: b"from 1"}
    assert first.run_id == second.run_id


def test_another_server_on_the_published_port_is_not_taken_for_ours() -> None:
    rendezvous = HashStore()
    TCPStoreCoordinator.start(0, 2, rendezvous=rendezvous)  # gone at once: nobody keeps it
    published = rendezvous.get("coordinator/1").decode()
    port = int(published.split('"port":')[1].rstrip("}"))
    stranger = TCPStoreCoordinator.start(0, 2, address=("localhost", port))
    with pytest.raises(LandfallError, match=f"another run \\({stranger.run_id}\\)"):
        TCPStoreCoordinator.start(1, 2, rendezvous=rendezvous, deadline_s=0.5)


def test_an_address_that_does_not_answer_leads_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "CONNECT_S", 1.0)
    port = free_port()
    first = TCPStoreCoordinator.start(0, 2, address=("localhost", port))
    rendezvous = HashStore()
    published = {"run_id": first.run_id, "hosts": ["no-such-host.invalid", "localhost"], "port": port}
    rendezvous.set("coordinator/1", json.dumps(published))
    second = TCPStoreCoordinator.start(1, 2, rendezvous=rendezvous, deadline_s=60)
    second.post("hello", b"from 1")
    assert first.collect("hello", [1], 30) == {1: b"from 1"}


def test_a_master_of_its_own_is_published_and_a_foreign_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert meeting.own_hosts()[0] == "localhost"
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")  # reserved for documentation: nobody's
    hosts = meeting.own_hosts()
    assert "192.0.2.1" not in hosts
    assert hosts[-1] == socket.gethostname()


def test_ranks_outside_the_world_are_refused() -> None:
    with pytest.raises(ValueError, match="world of 2"):
        alone(2).collect("key", [2], 0.1)
