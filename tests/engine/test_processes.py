"""What process 0 and the others send one another, here through a pair of sockets."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from pallas_paged.engine import EngineDeadError
from pallas_paged.engine.device import processes
from pallas_paged.engine.device.processes import Followers, Leader
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
    def __init__(self):
        self.calls: list = []

    def __getattr__(self, name: str):
        return lambda *args: self.calls.append((name, args))


def test_calls_of_any_size_are_made_in_order_until_the_release(pair):
    """A second release is sent only after the other processes follow again."""
    followers, leader = pair
    executor, arrays = Recorder(), (np.arange(2), np.arange(10**6))

    def send():
        for name, args in [("fork", arrays), ("release", ()), ("release", ()), ("sleep", ())]:
            followers.send(name, args)
        followers.rejoin()
        followers.send("release")
        followers.close()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        returned = [(leader.follow(executor), len(executor.calls)) for _ in range(3)]
        sending.result()
    assert returned == [(True, 1), (True, 2), (False, 2)]
    (_, received), (name, args) = executor.calls
    assert (name, args) == ("sleep", ())
    for array, wanted in zip(received, arrays, strict=True):
        np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda followers, _: followers.close(RuntimeError("no room")), "failed: no room"),
        (lambda _, sockets: sockets[0].close(), "has ended without a close"),
    ],
    ids=["error", "death"],
)
def test_the_end_of_process_0_reaches_the_others(pair, sockets, end, message):
    followers, leader = pair
    end(followers, sockets)
    with pytest.raises(RuntimeError, match=f"process 0 {message}"):
        leader.follow(Recorder())


@pytest.mark.parametrize("reason", [None, ValueError("no memory")], ids=str)
def test_process_0_waits_no_longer_for_devices_if_another_has_ended(pair, reason):
    followers, leader = pair
    never = SimpleNamespace(is_ready=lambda: False)
    threading.Timer(0.05, lambda: leader.fail(reason) if reason else leader.close()).start()
    what = "failed: ValueError: no memory" if reason else "ended"
    with pytest.raises(RuntimeError, match=f"process 1 has {what}"):
        followers.wait([never])


def test_the_others_hear_of_the_end_of_one_of_them():
    pairs = [socket.socketpair() for _ in range(3)]
    followers = Followers([ours for ours, _ in pairs])
    leaders = [Leader(theirs) for _, theirs in pairs]
    leaders[0].close()
    with pytest.raises(RuntimeError, match="process 1 has ended") as caught:
        followers.send("wake_up")
    followers.close(caught.value)
    for leader in leaders[1:]:
        with pytest.raises(RuntimeError, match="process 0 failed: process 1 has ended"):
            leader.follow(Recorder())


@pytest.mark.cpu_budget(8)  # compiles steps with penalties and beams, where no test has before
def test_an_engine_sends_every_call_that_changes_its_state(pair):
    followers, leader = pair
    engine, other = make_engine(), make_engine()
    executors = ours, theirs = [one.replicas[0].runner.executor for one in (engine, other)]
    engine.replicas.followers = ours.followers = followers
    load = [greedy(), greedy(presence_penalty=1.0), greedy(n=1, beam_width=2, max_tokens=4)]
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(leader.follow, theirs)
        serve(engine, [[1, 2, 3], [4] * 9, [5, 6]], load)
        engine.sleep()
        engine.wake_up()
        serve(engine, [[1, 2, 3, 4, 5]], greedy())
        followers.send("release")
        assert following.result(60)
    states = [(one.state.table, one.state.pool) for one in executors]
    jax.tree.map(np.testing.assert_array_equal, *states)


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
    followers.send("wake_up")
    followers.send("release")
    executor = Recorder()
    assert Leader(sockets[-1]).follow(executor)
    assert executor.calls == [("wake_up", ())]
    for one in sockets:
        one.close()
    followers.close()


def test_processes_that_do_not_connect_make_other_engines_or_do_not_follow_are_refused(monkeypatch):
    monkeypatch.setattr(processes, "CONNECT_SECONDS", 0.05)
    as_process_0_of(3, monkeypatch, lambda greeting: greeting)
    with pytest.raises(TimeoutError, match=r"the processes \[1, 2\] do not connect"):
        processes.connect("sizes")
    gathered = lambda x: np.stack([x, x, x[::-1]])  # noqa: E731
    monkeypatch.setattr(processes.multihost_utils, "process_allgather", gathered)
    with pytest.raises(ValueError, match=r"the processes \[2\] make another engine"):
        processes.connect("sizes")
    with pytest.raises(RuntimeError, match="follow"):
        make_engine().follow()


def test_an_update_that_fails_in_process_0_after_the_others_have_theirs_ends_the_engine(pair):
    """Bad parameters are refused before."""
    followers, leader = pair
    engine, params = make_engine(), weights()
    replicas = engine.replicas
    replicas.num_processes = 2
    replicas.followers = replicas[0].runner.executor.followers = followers
    with pytest.raises(ValueError, match="was compiled"):
        engine.update_params(params | dict(head=params["head"][:3]))
    replicas[0].weights.put = lambda _: (_ for _ in ()).throw(MemoryError("no room"))
    with pytest.raises(EngineDeadError, match="no room"):
        engine.update_params(params)
    assert leader.follow(Recorder())
    with pytest.raises(RuntimeError, match="process 0 failed: no room"):
        leader.follow(Recorder())


def test_an_update_that_fails_in_another_process_ends_the_engine(pair):
    """Process 0 has the new weights already."""
    followers, leader = pair
    engine, params = make_engine(), weights()
    engine.replicas.num_processes, engine.replicas.leader = 2, leader
    with pytest.raises(EngineDeadError, match="was compiled"):
        engine.update_params(params | dict(head=params["head"][:3]))
    with pytest.raises(RuntimeError, match="process 1 has failed: ValueError"):
        followers.send("wake_up")
