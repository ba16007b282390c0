"""What endpoints ask for: the plane, and who acts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Depends, Header, Path, Request, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from controlplane.errors import InvalidError
from controlplane.plane import Plane

ACTOR = re.compile(r"[A-Za-z0-9._@+-]{1,64}")
ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"
IdPath = Annotated[str, Path(pattern=ID_PATTERN)]

# The edge checks the token for every write; this only tells the OpenAPI document about it.
_scheme = HTTPBearer(auto_error=False, description="The token file of the control plane's host")
TokenNeeded = Annotated[HTTPAuthorizationCredentials | None, Security(_scheme)]


@dataclass(frozen=True, slots=True)
class Actor:
    """Who an audit row names. Whoever holds the token says who they are."""

    name: str
    request_id: str


def get_plane(request: Request) -> Plane:
    plane: Plane = request.app.state.plane
    return plane


def operator(
    request: Request,
    _token: TokenNeeded,
    x_perilune_actor: Annotated[str, Header()] = "operator",
) -> Actor:
    if not ACTOR.fullmatch(x_perilune_actor):
        raise InvalidError(
            "X-Perilune-Actor: not a name.",
            field="X-Perilune-Actor",
            value=x_perilune_actor,
            way_out="Use up to 64 letters, digits and ._@+- or leave it out.",
        )
    return Actor(x_perilune_actor, request.state.request_id)


def known_parameters_only(request: Request) -> None:
    """A misspelt filter must not silently match everything."""
    known = _query_names(request.scope["route"].dependant)
    for name, value in request.query_params.multi_items():
        if name not in known:
            allowed = ", ".join(sorted(known)) or "none"
            raise InvalidError(
                f"{name}: no such query parameter.",
                field=name,
                value=value,
                way_out=f"Known here: {allowed}.",
            )


def _query_names(dependant: Any) -> set[str]:
    names = {parameter.alias for parameter in dependant.query_params}
    for inner in dependant.dependencies:
        names |= _query_names(inner)
    return names


PlaneDep = Annotated[Plane, Depends(get_plane)]
OperatorDep = Annotated[Actor, Depends(operator)]
Reason = Annotated[str, "why, for the audit trail"]
