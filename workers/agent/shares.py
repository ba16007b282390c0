"""Gateways' load at this node's workers, passed on to the other gateways.

Kept for as long as its gateway's connection lasts. A newcomer is told what is there, and the others
of it, so that a gateway that is alone need not tell anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from workers.agent.session import Session
from workers.core.gateway_messages import GatewayShare, TellShare, fault_of
from workers.core.messages import Done, Refused, ReplyBody

MAX_GATEWAYS: Final = 64


class Shares:
    """One node's. `sessions` are the agent's, by connection."""

    def __init__(self, sessions: Mapping[int, Session]) -> None:
        self._sessions = sessions
        self._last: dict[int, GatewayShare] = {}  # by connection, of those that subscribed

    def handlers(self) -> dict[type, Callable[[Session, Any], ReplyBody]]:
        return {TellShare: self._tell}

    def joined(self, session: Session) -> None:
        """It subscribed with `shares`. Once more after a resync changes nothing."""
        if session.connection in self._last or len(self._last) >= MAX_GATEWAYS:
            return
        if session.subscriber is not None:
            for share in self._last.values():
                session.subscriber.offer(share)
        name = f"{session.hello.client_id}#{session.connection}"
        self._pass_on(session.connection, GatewayShare(name))

    def left(self, connection: int) -> None:
        """Its connection has ended, in whatever way. Idempotent."""
        share = self._last.pop(connection, None)
        if share is not None:
            self._offer(connection, GatewayShare(share.gateway, gone=True))

    def _tell(self, session: Session, body: TellShare) -> ReplyBody:
        known = self._last.get(session.connection)
        if known is None:
            message = "Subscribe with `shares` first, as a gateway."
            if len(self._last) >= MAX_GATEWAYS:
                message = f"{MAX_GATEWAYS} gateways tell their load here already."
            return Refused("no_shares", message)
        if fault := fault_of(body):
            return Refused("share", f"TellShare of {session.hello.client_id}: {fault}.")
        share = GatewayShare(
            known.gateway, body.shares, body.prefills, body.decodes, body.coming, body.ended
        )
        self._pass_on(session.connection, share)
        return Done(len(self._last) - 1)

    def _pass_on(self, connection: int, share: GatewayShare) -> None:
        # A newcomer learns what runs, not what was learned.
        self._last[connection] = GatewayShare(share.gateway, share.shares)
        self._offer(connection, share)

    def _offer(self, connection: int, share: GatewayShare) -> None:
        for other in self._last:
            session = self._sessions.get(other) if other != connection else None
            if session is not None and session.subscriber is not None:
                session.subscriber.offer(share)
