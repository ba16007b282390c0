"""The blocking client against an agent that answers when the test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.client import AgentClient, make_hello
from workers.core.errors import AgentUnavailableError, RefusedError
from workers.core.framing import FrameBuffer, decode_request, encode_reply
from workers.core.messages import (
    Done,
    Hello,
    Lookup,
    LookupReply,
    Refused,
    Release,
    Renew,
    Welcome,
)

WAIT = 20.0


class ScriptedAgent:
    """Takes one connection; requests are answered by `answer(seq, body)`, which may wait."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[object] = []
        self.reads: list[int] = []  # requests in one read
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        frames = FrameBuffer()
        while data := connection.recv(1 << 20):
            documents = frames.feed(data)
            self.reads.append(len(documents))
            for document in documents:
                request = decode_request(document)
                if not isinstance(request.body, Hello):
                    assert self.gate.wait(WAIT)
                    self.seen.append(request.body)
                try:
                    connection.sendall(encode_reply(request.seq, self.answer(request.body)))
                except OSError:
                    return

    def answer(self, body: object) -> object:
        match body:
            case Hello():
                return Welcome("n1", 1, "", 0, 0, 64, 0, 30.0)
            case Lookup(block_hashes=hashes):
                return LookupReply(len(hashes))
            case Release():
                return Refused("no", "not now")
        return Done(1)

    def close(self) -> None:
        self.gate.set()
        self._listener.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[ScriptedAgent]:
    made = ScriptedAgent(tmp_path / "a.sock")
    yield made
    made.close()


@pytest.fixture
def client(scripted: ScriptedAgent) -> Iterator[AgentClient]:
    made = AgentClient(str(scripted.path), make_hello("cli", "test"), WAIT)
    made.connect()
    yield made
    made.close()


def lookups(*lengths: int) -> list[Lookup]:
    return [Lookup(b"n", [b"k"] * length) for length in lengths]


class TestMany:
    def test_one_round_trip_in_order(self, scripted: ScriptedAgent, client: AgentClient) -> None:
        replies = client.call_many(lookups(3, 1, 2), LookupReply)
        assert [reply.num_held for reply in replies] == [3, 1, 2]
        assert scripted.reads[-1] == 3

    def test_by_name(self, client: AgentClient) -> None:
        replies = client.lookup_many(b"n", [[b"a"], [b"b", b"c"]])
        assert [reply.num_held for reply in replies] == [1, 2]

    def test_a_refusal_among_them_is_raised_and_the_connection_stays(
        self, client: AgentClient
    ) -> None:
        with pytest.raises(RefusedError):
            client.call_many([Lookup(b"n", []), Release("o"), Lookup(b"n", [])], LookupReply)
        assert client.connected
        assert client.call(Lookup(b"n", [b"k"]), LookupReply).num_held == 1


class TestLate:
    def test_answers_in_time_are_plain_answers(self, client: AgentClient) -> None:
        found = client.try_many(lookups(1, 2), LookupReply, WAIT, pytest.fail)
        assert [reply and reply.num_held for reply in found] == [1, 2]

    def test_a_late_answer_goes_to_its_taker_and_the_next_call_gets_its_own(
        self, scripted: ScriptedAgent, client: AgentClient
    ) -> None:
        late: list[tuple[object, object]] = []
        scripted.gate.clear()
        found = client.try_many(
            lookups(1, 2), LookupReply, 0.02, lambda body, reply: late.append((body, reply))
        )
        assert found == [None, None]
        assert client.connected
        scripted.gate.set()
        assert client.call(Lookup(b"n", [b"k"] * 5), LookupReply).num_held == 5
        assert late == list(zip(lookups(1, 2), [LookupReply(1), LookupReply(2)], strict=True))

    def test_a_refusal_is_none(self, client: AgentClient) -> None:
        assert client.try_many([Release("o")], Done, WAIT, pytest.fail) == [None]

    def test_too_many_late_answers_end_the_connection(
        self, scripted: ScriptedAgent, client: AgentClient
    ) -> None:
        scripted.gate.clear()
        while client.connected:
            with contextlib.suppress(AgentUnavailableError):
                client.try_many([Renew([])] * 20, Done, 0.02, lambda *_: None)
        with pytest.raises(AgentUnavailableError, match="too many answers are late"):
            client.call(Renew([]), Done)

    def test_time_lost_to_others_calls_is_not_held_against_the_agent(
        self, client: AgentClient
    ) -> None:
        with pytest.raises(AgentUnavailableError, match="no time was left"):
            client.call(Renew([]), Done, 1e-9)
        assert client.connected

    def test_a_plain_call_that_is_late_ends_the_connection(
        self, scripted: ScriptedAgent, client: AgentClient
    ) -> None:
        scripted.gate.clear()
        with pytest.raises(AgentUnavailableError):
            client.call(Renew([]), Done, 0.02)
        assert not client.connected

    def test_what_was_late_on_a_lost_connection_is_forgotten(
        self, scripted: ScriptedAgent, client: AgentClient
    ) -> None:
        scripted.gate.clear()
        client.try_many(lookups(1), LookupReply, 0.02, lambda *_: pytest.fail("of another life"))
        client.close()
        scripted.gate.set()
        assert client.call(Lookup(b"n", [b"k"] * 2), LookupReply).num_held == 2


class TestNewRequests:
    def test_tiers_and_hints(self, client: AgentClient, scripted: ScriptedAgent) -> None:
        with pytest.raises(Exception, match="Done"):
            client.promote("o", b"n", [b"k"])  # this agent answers nonsense
        assert client.hint(b"n", [b"k"], "over") == 1
        assert [type(body).__name__ for body in scripted.seen] == ["Promote", "Hint"]
