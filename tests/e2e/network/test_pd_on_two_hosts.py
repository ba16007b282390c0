"""Prefill and decode of real vLLM on two hosts: answers are those of one engine without a pool, and
the books show every byte that went between the hosts.

The reference is primed as in the acceptance run: it holds exactly the tokens that the decode leg did
not compute, since a prefill's shape changes low bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import pytest
from live_cluster import BLOCK_TOKENS, wait_for
from net_cluster import MODEL, NetCluster, net_cluster, served_tokens, text_of, until_moved

from workers.bench.cluster import PlainEngine
from workers.bench.openai_stream import complete, reset_device_cache, tokenize
from workers.bench.prompts import make_prompts

pytestmark = [
    pytest.mark.vllm, pytest.mark.netns, pytest.mark.xdist_group("netns"),
    pytest.mark.timeout(900),
]  # fmt: skip

MAX_TOKENS = 12
START_SECONDS = 600.0
ANSWER_SECONDS = 60.0
SLAB_BYTES = 768 << 20
PROMPTS = [
    prompt.text
    for prompt in make_prompts(
        11, seed=23, num_families=11, shared_tokens=60, min_tokens=300, max_tokens=900
    )
]
SHORT = [
    prompt.text
    for prompt in make_prompts(
        200, seed=29, num_families=200, shared_tokens=20, min_tokens=140, max_tokens=180
    )
]
PULLED, PUSHED = PROMPTS[:4], PROMPTS[4:7]
DEAD_LINK, DEAD_PUSH, PULLED_CABLE, UNPLUGGED = PROMPTS[7:]


@dataclass
class Reference:
    """The engine without a pool. It is on no host of the network: a thread outside asks it."""

    client: httpx2.Client
    engine: PlainEngine
    outside: ThreadPoolExecutor

    def text(self, prompt: str, num_held: int) -> str:
        """Its answer while its own cache holds that many of the prompt's tokens."""
        return self.outside.submit(self._text, prompt, num_held).result()

    def _text(self, prompt: str, num_held: int) -> str:
        client, url = self.client, self.engine.url
        reset_device_cache(client, url)
        if num_held:
            tokens = tokenize(client, url, MODEL, prompt)
            complete(client, url, MODEL, tokens[:num_held], 1)
        return complete(client, url, MODEL, prompt, MAX_TOKENS).text


@dataclass
class Answer:
    """What the cluster said, and what its decode leg took from the pool."""

    prompt: str
    text: str
    record: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        """Whole blocks before the last token, which is always computed."""
        return (int(self.record["prompt_tokens"]) - 1) // BLOCK_TOKENS

    @property
    def served(self) -> int:
        return served_tokens(self.record)


def ask(cluster: NetCluster, prompt: str) -> Answer:
    reply = cluster.complete(prompt, MAX_TOKENS)
    return Answer(prompt, text_of(reply), cluster.decision(reply))


@pytest.fixture(scope="module")
def booted(
    tmp_path_factory: pytest.TempPathFactory,
    model_folder: Path,
    plain_beginning: Future[PlainEngine],
) -> Iterator[tuple[NetCluster, Reference]]:
    """Three engines, started together."""
    folder = tmp_path_factory.mktemp("net")
    with (
        httpx2.Client(timeout=120, trust_env=False) as client,
        ThreadPoolExecutor(1) as outside,
    ):
        outside.submit(int).result()  # its thread is made here, before this one enters a host
        with net_cluster(
            folder, model_folder, "vllm", slab_bytes=SLAB_BYTES, seconds=START_SECONDS
        ) as cluster:
            engine = plain_beginning.result(START_SECONDS)
            cluster.wait_serving(START_SECONDS)
            yield cluster, Reference(client, engine, outside)


@pytest.fixture(scope="module")
def cluster(booted: tuple[NetCluster, Reference]) -> NetCluster:
    return booted[0]


@pytest.fixture(scope="module")
def reference(booted: tuple[NetCluster, Reference]) -> Reference:
    return booted[1]


@pytest.fixture(scope="module")
def short() -> Iterator[str]:
    """Prompts of two blocks that nobody has asked yet."""
    return iter(SHORT)


@pytest.fixture(scope="module")
def answers(cluster: NetCluster, short: Iterator[str]) -> list[Answer]:
    """Each prompt once, one after the other: the first ones pulled by the decode host, the others
    pushed to it."""
    found = []
    ways: list[tuple[Literal["pull", "push"], list[str]]] = [("pull", PULLED), ("push", PUSHED)]
    for mode, prompts in ways:
        use(cluster, short, mode)
        found += [ask(cluster, prompt) for prompt in prompts]
    return found


def use(cluster: NetCluster, short: Iterator[str], mode: Literal["pull", "push"]) -> None:
    """Have blocks go in this way, and wait until they do."""
    cluster.transfer_mode(mode)
    until_moved(cluster, short, mode)


def test_texts_are_those_of_one_engine(answers: list[Answer], reference: Reference) -> None:
    for answer in answers:
        assert answer.text == reference.text(answer.prompt, answer.served)


def test_decode_computes_only_the_tail(answers: list[Answer]) -> None:
    """All that the other host had has come. Two may have come too late: this machine may be busy."""
    late = [each for each in answers if each.served < each.num_blocks * BLOCK_TOKENS]
    assert len(late) <= 2, [each.record["decode_leg"] for each in late]
    for answer in answers:
        assert answer.served <= answer.num_blocks * BLOCK_TOKENS
        assert answer.record["decode_leg"]["failed_blocks"] == 0
        assert answer.record["prefill_leg"]["worker_id"] == "p1"


def test_the_matrix_shows_what_the_slots_hold(cluster: NetCluster, answers: list[Answer]) -> None:
    """To within 1 %: the decode host computes no blocks of its own, so its slots hold what came."""
    stats = cluster.nodes["n2"].stats()
    held = stats.used_blocks * stats.block_bytes
    assert stats.evicted_by_cause.get("capacity", 0) == 0
    assert held >= 0.5 * sum(answer.num_blocks for answer in answers) * stats.block_bytes
    assert min(cluster.moved("pull"), cluster.moved("push")) > 0

    def shown(url: str, rows: str, **wanted: str) -> list[int]:
        return [
            row["bytes"]
            for row in cluster.get(url, **({"window": 3600} if rows == "pairs" else {}))[rows]
            if all(row[name] == value for name, value in wanted.items())
        ]

    ways = {"source": "n1", "destination": "n2"}

    def close() -> bool:  # they follow the heartbeats
        matrix = shown("/transfers/matrix", "pairs", kind="node", path="tcp", **ways)
        rows = shown("/transfers/nodes", "rows", transport="tcp", **ways)
        return all(abs(sum(each) - held) <= 0.01 * held for each in (matrix, rows))

    wait_for(close, 20, f"matrix and rows to show {held} bytes")
    back = shown("/transfers/nodes", "rows", source="n2", destination="n1")
    assert sum(back) == 0


def test_what_is_there_does_not_travel_again(
    cluster: NetCluster, answers: list[Answer], reference: Reference
) -> None:
    for node in cluster.nodes.values():
        reset_device_cache(cluster.client, node.url)
    before = cluster.moved()
    again = ask(cluster, answers[0].prompt)
    assert cluster.moved() == before
    assert again.record["decode_leg"]["loaded_blocks"] == again.num_blocks
    assert again.text == reference.text(again.prompt, again.served)


def recovers(cluster: NetCluster, short: Iterator[str]) -> None:
    """Without a restart: the processes are the same, and blocks come again."""
    wait_for(lambda: cluster.ready_workers() == {"p1", "d1"}, 60, "both workers to be ready")
    until_moved(cluster, short)
    assert {row["restarts"] for row in cluster.items("/workers")} == {0}


def cut_off(cluster: NetCluster) -> None:
    """Of what one host sends to the other only control messages arrive, on open connections too."""
    one, two = cluster.nodes["n1"].host, cluster.nodes["n2"].host
    two.wall(f"ip saddr {one.address} tcp sport != 7710 tcp dport != 7710 drop")


@pytest.mark.parametrize(("mode", "prompt"), [("pull", DEAD_LINK), ("push", DEAD_PUSH)])
def test_c22_a_link_that_dies_between_handshake_and_read(
    cluster: NetCluster, reference: Reference, short: Iterator[str], mode: Any, prompt: str
) -> None:
    """The connections are open and proved; not one byte of a block arrives on them."""
    use(cluster, short, mode)
    reader, holder = ("n2", "n1") if mode == "pull" else ("n1", "n2")
    links = cluster.nodes[reader].stats().transfers.links
    assert {link.state for link in links if link.peer == holder} == {"up"}
    before = cluster.moved()
    cut_off(cluster)
    try:
        began = time.monotonic()
        answer = ask(cluster, prompt)
        took = time.monotonic() - began
    finally:
        cluster.nodes["n2"].host.heal()
    assert cluster.moved() == before
    assert answer.record["decode_leg"]["pool_hit_tokens"] == 0, answer.record["decode_leg"]
    assert answer.text == reference.text(prompt, answer.served)
    assert took < ANSWER_SECONDS
    recovers(cluster, short)


def test_c22_a_cable_pulled_in_the_middle_of_a_read(
    cluster: NetCluster, reference: Reference, short: Iterator[str]
) -> None:
    """Some blocks have come; the rest is computed. The other host cannot be reached at all then, and
    what is asked meanwhile is computed by the decode worker alone."""
    use(cluster, short, "pull")
    one, two = cluster.nodes["n1"], cluster.nodes["n2"]
    before = two.stats().stored_blocks_total
    one.host.cap(60)
    answered: list[Answer] = []
    asking = threading.Thread(target=lambda: answered.append(ask_from_afar(cluster, PULLED_CABLE)))
    asking.start()
    try:
        wait_for(lambda: two.stats().pending_blocks > 0, ANSWER_SECONDS, "the read to begin")
        wait_for(
            lambda: two.stats().stored_blocks_total > before or not two.stats().pending_blocks,
            ANSWER_SECONDS, "the first blocks",
        )  # fmt: skip
        one.host.cut()
        asking.join(ANSWER_SECONDS)
        began = time.monotonic()
        alone = ask(cluster, UNPLUGGED)
        took = time.monotonic() - began
    finally:
        one.host.join()
        one.host.cap(None)
        asking.join(ANSWER_SECONDS)
    (answer,) = answered
    assert answer.served < answer.num_blocks * BLOCK_TOKENS, "it was cut too late"
    assert answer.text == reference.text(PULLED_CABLE, answer.served)
    assert alone.text == reference.text(UNPLUGGED, alone.served)
    assert took < ANSWER_SECONDS
    recovers(cluster, short)


def ask_from_afar(cluster: NetCluster, prompt: str) -> Answer:
    """In a thread of its own."""
    with httpx2.Client(timeout=120, trust_env=False) as client:
        reply = cluster.complete(prompt, MAX_TOKENS, client)
        return Answer(prompt, text_of(reply), cluster.decision(reply))


def test_nothing_stays_pinned_or_under_way(cluster: NetCluster) -> None:
    def settled() -> bool:
        found = [node.stats() for node in cluster.nodes.values()]
        return all((each.pinned_blocks, each.pending_blocks) == (0, 0) for each in found)

    wait_for(settled, 60, "pins to end with their leases")
