"""Which transport a transfer takes: what is set for the pair, else the cheapest that both offer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from workers.core.transfer_choice import PRIORS, Cost, CostModel
from workers.core.transfer_stats import CHOICE_BYTES
from workers.core.transfer_types import Direction, LinkId, TransferRequest
from workers.transfer.base import PeerAddress, Transport

MAX_OVERRIDES: Final = 2048
MAX_LINKS: Final = 2048
PairWay = tuple[str, Direction]


@dataclass(frozen=True, slots=True)
class Judged:
    """How one path stands for a transfer of `CHOICE_BYTES`, in seconds, and why it is chosen or not."""

    chosen: bool
    override: bool
    seconds: float
    why: str


class Chooser:
    """Not thread-safe; `now` is monotonic seconds."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self.costs = CostModel()
        self._transports = transports
        self._overrides: dict[PairWay, str] = {}
        self._ways: dict[LinkId, Direction] = {}  # of the last transfer

    def override(self, peer: str, transport: str | None, direction: Direction) -> None:
        """Take this for that peer, whatever it costs; None: choose again. ValueError."""
        self._overrides.pop((peer, direction), None)
        if transport is None:
            return
        if transport not in self._transports:
            known = ", ".join(sorted(self._transports))
            raise ValueError(f"transport = {transport!r}: this node has {known}")
        if len(self._overrides) < MAX_OVERRIDES:
            self._overrides[peer, direction] = transport

    def replace_overrides(self, overrides: Mapping[PairWay, str]) -> None:
        """These and no others. One that this node does not have is kept, and shown as such."""
        self._overrides = dict(list(overrides.items())[:MAX_OVERRIDES])

    def choose(
        self,
        peer: PeerAddress | None,
        request: TransferRequest,
        now: float,
        among: Collection[str] | None = None,
    ) -> str:
        """Of these, if any are named. ValueError: the peer is unknown, or has nothing in common with
        this node."""
        if peer is None:
            raise ValueError(f"peer = {request.peer!r}: no address of it is known")
        num_bytes = sum(piece.num_bytes for piece in request.pieces)
        chosen = self._cheapest(peer, request.direction, num_bytes, now, among)
        if chosen is None:
            raise ValueError(
                f"peer {request.peer} offers {sorted(peer.addresses)}, "
                f"this node has {sorted(self._transports)}: no transport in common"
            )
        return chosen

    def find(self, peer: PeerAddress, request: TransferRequest, now: float) -> str | None:
        """As `choose`; None where they have nothing in common."""
        num_bytes = sum(piece.num_bytes for piece in request.pieces)
        return self._cheapest(peer, request.direction, num_bytes, now)

    def used(self, link: LinkId, direction: Direction) -> None:
        if link in self._ways or len(self._ways) < MAX_LINKS:
            self._ways[link] = direction

    def judge(self, peer: PeerAddress | None, link: LinkId, now: float) -> Judged:
        """What is to be shown of a link."""
        direction = self._ways.get(link, Direction.PULL)
        seconds = self.costs.cost(link, now).seconds(CHOICE_BYTES)
        if peer is None:
            return Judged(chosen=False, override=False, seconds=seconds, why="its peer is gone")
        chosen = self._cheapest(peer, direction, CHOICE_BYTES, now)
        forced = self._overrides.get((link.peer, direction))
        why = self._why(peer, direction, forced, now)
        return Judged(chosen == link.transport, forced == link.transport, seconds, why)

    def best_cost(
        self, peer: PeerAddress | None, direction: Direction, now: float, unmeasured: Cost | None
    ) -> Cost:
        """Of the path that a transfer of `CHOICE_BYTES` would take. A peer that is not known yet is
        taken to be reached over TCP; `unmeasured` stands for TCP that has carried nothing yet."""
        name = None if peer is None else self._cheapest(peer, direction, CHOICE_BYTES, now)
        link = None if peer is None or name is None else LinkId(peer.node_id, name)
        if link is None or (link.transport == "tcp" and self.costs.measured(link) is None):
            return unmeasured or PRIORS["tcp"]
        return self.costs.cost(link, now)

    def _cheapest(
        self,
        peer: PeerAddress,
        direction: Direction,
        num_bytes: int,
        now: float,
        among: Collection[str] | None = None,
    ) -> str | None:
        offered = self.offered(peer, direction)
        if among is not None:
            offered = [name for name in offered if name in among]
        forced = self._overrides.get((peer.node_id, direction))
        if forced in offered:
            return forced
        return self.costs.choose(peer.node_id, num_bytes, offered, now)

    def offered(self, peer: PeerAddress, direction: Direction) -> list[str]:
        """What both have, for that way."""
        pulls = direction is Direction.PULL
        return [
            name
            for name, transport in self._transports.items()
            if name in peer.addresses and (pulls or transport.pushes)
        ]

    def _why(self, peer: PeerAddress, direction: Direction, forced: str | None, now: float) -> str:
        offered = self.offered(peer, direction)
        if forced is not None and forced in offered:
            return "set for this pair"
        note = f"{forced} is set for this pair, and not offered by both; " if forced else ""
        if len(offered) < 2:
            return f"{note}the only one that both offer"
        prices = sorted(
            (self.costs.cost(LinkId(peer.node_id, name), now).seconds(CHOICE_BYTES), name)
            for name in offered
        )
        listed = ", ".join(f"{name} {seconds * 1000:.3g} ms" for seconds, name in prices)
        return f"{note}cost of 1 MiB: {listed}"
