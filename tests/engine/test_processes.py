"""What process 0 and the others send one another, here through a pair of sockets."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_paged.engine import EngineDeadError, processes
from pallas_paged.engine.processes import Followers, Leader
from tests.support.engine_calls import greedy, make_engine, serve, weights


@pytest.fixture
def sockets():
    return socket.socketpair()


@pytest.fixture
def pair(sockets):
    followers, leader = Followers(sockets[:1]), Leader(sockets[1])
    yield followers, leader
    followers.close()
    leader.close()


class Recorder:
    """An executor that notes its calls."""

    def __init__(self):
        self.calls: list = []

    def __getattr__(self, name: str):
        return lambda *args: self.calls.append((name, args))


def test_calls_are_made_in_order_until_the_release(pair):
    followers, leader = pair
    executor = Recorder()
    followers.send("fork", (np.arange(2), np.arange(3)))
    followers.send("wake")
    followers.send("release")
    followers.send("sleep")
    assert leader.follow(executor)
    assert [name for name, _ in executor.calls] == ["fork", "wake"]
    np.testing.assert_array_equal(executor.calls[0][1][1], np.arange(3))
    followers.close()
    assert not leader.follow(executor)
    assert executor.calls[-1] == ("sleep", ())


def test_a_second_release_is_sent_only_after_the_others_follow_again(pair):
    followers, leader = pair
    followers.send("release")
    followers.send("release")
    followers.rejoin()
    followers.send("release")
    followers.close()
    assert [leader.follow(Recorder()) for _ in range(3)] == [True, True, False]


def test_a_large_message_arrives_whole(pair):
    followers, leader = pair
    executor, array = Recorder(), np.arange(10**6)
    sender = threading.Thread(target=lambda: [followers.send("step", (array,)), followers.close()])
    sender.start()
    assert not leader.follow(executor)
    sender.join()
    np.testing.assert_array_equal(executor.calls[0][1][0], array)


def test_an_error_of_process_0_reaches_the_others(pair):
    followers, leader = pair
    followers.close(RuntimeError("out of memory"))
    with pytest.raises(RuntimeError, match="process 0 failed: out of memory"):
        leader.follow(Recorder())


def test_the_end_of_process_0_is_an_error(pair, sockets):
    _, leader = pair
    sockets[0].close()
    with pytest.raises(RuntimeError, match="process 0 has ended without a close"):
        leader.follow(Recorder())


@pytest.mark.parametrize("reason", [None, ValueError("no memory")], ids=str)
def test_process_0_waits_no_longer_for_devices_if_another_has_ended(pair, reason):
    followers, leader = pair
    never = SimpleNamespace(is_ready=lambda: False)
    threading.Timer(0.05, lambda: leader.fail(reason) if reason else leader.close()).start()
    what = "failed: ValueError: no memory" if reason else "ended"
    with pytest.raises(RuntimeError, match=f"process 1 has {what}"):
        followers.wait([never])


def test_a_message_to_a_process_that_has_ended_is_an_error(pair):
    followers, leader = pair
    leader.close()
    with pytest.raises(RuntimeError, match="process 1 has ended"):
        followers.send("wake")


def test_the_others_hear_of_the_end_of_one_of_them():
    pairs = [socket.socketpair() for _ in range(3)]
    followers = Followers([ours for ours, _ in pairs])
    leaders = [Leader(theirs) for _, theirs in pairs]
    leaders[0].close()
    with pytest.raises(RuntimeError, match="process 1 has ended") as caught:
        followers.send("wake")
    followers.close(caught.value)
    for leader in leaders[1:]:
        with pytest.raises(RuntimeError, match="process 0 failed: process 1 has ended"):
            leader.follow(Recorder())


def test_an_engine_sends_every_call_that_changes_its_state(pair):
    """Another engine that makes these calls has the same state."""
    followers, leader = pair
    engine, other = make_engine(), make_engine()
    engine.replicas.followers = engine.replicas[0].runner.executor.followers = followers
    load = [greedy(), greedy(presence_penalty=1.0), greedy(n=1, beam_width=2, max_tokens=4)]
    received: list[bool] = []

    def follow():
        received.append(leader.follow(other.replicas[0].runner.executor))

    thread = threading.Thread(target=follow)
    thread.start()
    serve(engine, [[1, 2, 3], [4] * 9, [5, 6]], load)
    engine.sleep()
    engine.wake()
    serve(engine, [[1, 2, 3, 4, 5]], greedy())
    ours = engine.replicas[0].runner.executor.state
    followers.send("release")
    thread.join(60)
    theirs = other.replicas[0].runner.executor.state
    assert received == [True]
    for name in ("block_tables", "seq_lens", "ref_counts", "num_free"):
        left, right = (np.asarray(getattr(state.table, name)) for state in (ours, theirs))
        np.testing.assert_array_equal(left, right, err_msg=name)
    for left, right in zip(ours.pool.layers, theirs.pool.layers, strict=True):
        np.testing.assert_array_equal(np.asarray(left.k_pages), np.asarray(right.k_pages))


def test_only_processes_that_follow_may_call_follow():
    engine = make_engine()
    with pytest.raises(RuntimeError, match="follow"):
        engine.follow()
    serve(engine, [[1]], greedy(max_tokens=1))


def as_process_0_of(num_processes, monkeypatch, broadcast):
    """Pretends that all processes make the same engine; `broadcast` sends what they need."""
    monkeypatch.setattr(jax, "process_count", lambda: num_processes)
    multihost = processes.multihost_utils
    monkeypatch.setattr(multihost, "process_allgather", lambda x: np.stack([x] * num_processes))
    monkeypatch.setattr(multihost, "broadcast_one_to_all", broadcast)


@pytest.mark.parametrize("message", [None, b"", b"GET / HTTP/1.1\r\n\r\n", bytes(36)], ids=repr)
def test_strangers_do_not_take_the_place_of_a_process(monkeypatch, message):
    """One is silent, one leaves, two send something else; then the process itself connects."""
    monkeypatch.setattr(processes, "GREETING_SECONDS", 0.2)
    sockets = []

    def connect(greeting: np.ndarray):  # port and key, which a stranger has not
        port, key = int.from_bytes(bytes(greeting[:2]), "little"), bytes(greeting[2:])
        for sent in (message, b"\1\0\0\0" + key):
            sockets.append(socket.create_connection(("localhost", port)))
            if sent is not None:
                sockets[-1].sendall(sent)
            if sent == b"":
                sockets[-1].close()
        return greeting

    as_process_0_of(2, monkeypatch, connect)
    followers, _ = processes.connect("sizes")
    followers.send("wake")
    followers.send("release")
    executor = Recorder()
    assert Leader(sockets[-1]).follow(executor)
    assert executor.calls == [("wake", ())]
    for one in sockets:
        one.close()
    followers.close()


def test_process_0_names_the_processes_that_do_not_connect(monkeypatch):
    monkeypatch.setattr(processes, "CONNECT_SECONDS", 0.05)
    as_process_0_of(3, monkeypatch, lambda greeting: greeting)
    with pytest.raises(TimeoutError, match=r"the processes \[1, 2\] do not connect"):
        processes.connect("sizes")


def test_processes_with_other_engines_are_refused(monkeypatch):
    monkeypatch.setattr(
        processes.multihost_utils, "process_allgather", lambda x: np.stack([x, x, x[::-1]])
    )
    with pytest.raises(ValueError, match=r"the processes \[2\] make another engine"):
        processes.connect("sizes")


@pytest.mark.parametrize("follows", [False, True])
def test_an_update_that_fails_after_the_others_have_theirs_ends_the_engine(pair, follows):
    """In process 0 bad parameters are refused before; the others would go on with old weights."""
    followers, leader = pair
    engine, params = make_engine(), weights()
    replicas, bad = engine.replicas, params | dict(head=params["head"][:3])
    replicas.num_processes = 2
    if follows:
        replicas.leader = leader
    else:
        replicas.followers = replicas[0].runner.executor.followers = followers
        with pytest.raises(ValueError, match="was compiled"):
            engine.update_params(bad)
        bad = params
        replicas[0].weights.put = lambda _: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(EngineDeadError, match="was compiled" if follows else "no room"):
        engine.update_params(bad)
    if follows:
        with pytest.raises(RuntimeError, match="process 1 has failed: ValueError"):
            followers.send("wake")
        return
    assert leader.follow(Recorder())
    with pytest.raises(RuntimeError, match="process 0 failed: no room"):
        leader.follow(Recorder())
