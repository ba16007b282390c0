"""An operator's cache operations on a pool: list, pin, unpin, purge. Pure; bounded slices.

Parents stand before their children in `PoolState.blocks`, so a walk from its end meets a chain's
tail before its head: what is purged on the way never leaves a hole.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import inf
from typing import Final

from workers.core.blocks import Block, BlockState
from workers.core.cache_messages import (
    MAX_CHAIN_BLOCKS,
    MAX_PAGE_CHAINS,
    MAX_PIN_SHARE,
    MAX_PINS,
    MAX_SLICE_BLOCKS,
    ChainInfo,
    ChainKeys,
    ChainPage,
    PinChains,
    PinInfo,
    PinList,
    PurgeChains,
    Selection,
    Slice,
    UnpinChains,
)
from workers.core.errors import PeriluneError
from workers.core.ids import BlockHash, OwnerId
from workers.core.owners import Owner
from workers.core.pool_state import ClientRef, PoolState

OPERATOR_PREFIX: Final = "operator:"
OPERATOR: Final = ClientRef(-1)
"""No connection has this number: an operator's pin ends by its time or by `unpin`."""
MAX_TIPS_SHOWN: Final = 64


class PinRefusedError(PeriluneError):
    """A pin that must not be; `code` is stable."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


# --- reading --------------------------------------------------------------------------------


def list_chains(
    pool: PoolState, selection: Selection, cursor: int, limit: int, now: float
) -> ChainPage:
    """A page of chains, from the block stored last to the first."""
    limit = max(1, min(limit, MAX_PAGE_CHAINS))
    spent = 0  # steps of this call: blocks looked at, and blocks of the chains shown
    chains: list[ChainInfo] = []
    for seen, block in enumerate(_walk(pool, selection, cursor)):
        if spent >= MAX_SLICE_BLOCKS or len(chains) == limit:
            return ChainPage(chains, max(0, cursor) + seen, len(pool.blocks))
        spent += 1
        if _matches(block, selection) and _is_tip(block):
            chains.append(_chain_info(pool, block, now))
            spent += chains[-1].num_blocks
    return ChainPage(chains, None, len(pool.blocks))


def chain_keys(pool: PoolState, key: bytes) -> ChainKeys:
    """From the head to `key`; without keys where that is not here, or longer than can be sent."""
    block = pool.blocks.get(BlockHash(key))
    path = [] if block is None else path_to(block)
    if block is None or len(path) > MAX_CHAIN_BLOCKS:
        return ChainKeys(b"", "", [])
    return ChainKeys(block.namespace, block.tenant, [b.key for b in path])


def list_pins(pool: PoolState, selection: Selection, now: float) -> PinList:
    """Operators' pins that hold a block of the selection, by name."""
    owners = operators(pool)
    found = [o for o in owners if any(_is_selected(block, selection) for block in o.pins)]
    infos = [_pin_info(owner, now) for owner in sorted(found, key=lambda owner: owner.id)]
    return PinList(infos, num_pinned_by_operators(owners), pool.slots.num_slots)


def operators(pool: PoolState) -> list[Owner]:
    """The owners of operators' pins."""
    return [owner for owner in pool.owners.all() if owner.id.startswith(OPERATOR_PREFIX)]


def num_pinned_by_operators(owners: list[Owner]) -> int:
    """Different blocks that these owners pin."""
    return len(set().union(*(owner.pins for owner in owners)))


def _pin_info(owner: Owner, now: float) -> PinInfo:
    pins = owner.pins
    few = len(pins) <= MAX_SLICE_BLOCKS
    tips: list[bytes] = [b.key for b in pins if few and pins.isdisjoint(b.children.values())]
    left = None if owner.deadline == inf else max(0.0, owner.deadline - now)
    name = owner.id.removeprefix(OPERATOR_PREFIX)
    return PinInfo(name, len(pins), left, tips[:MAX_TIPS_SHOWN], len(tips) if few else None)


def num_of_namespace(pool: PoolState, namespace: bytes) -> int:
    """Blocks of a namespace in the index. Looks at all of them: for the end of a purge."""
    return sum(block.namespace == namespace for block in pool.blocks.values())


# --- pins -----------------------------------------------------------------------------------


def pin(pool: PoolState, body: PinChains, now: float) -> Slice:
    """One slice of `PinChains`. PinRefusedError, TooManyOwnersError; what it refuses stays undone."""
    owner_id = OwnerId(f"{OPERATOR_PREFIX}{body.name}")
    if pool.owners.get(owner_id) is None and len(operators(pool)) >= MAX_PINS:
        raise PinRefusedError("too_many_pins", f"{MAX_PINS} pins are there. Unpin some first.")
    deadline = inf if body.seconds is None else now + body.seconds
    runs, seen, more = _runs_to_pin(pool, body, owner_id)
    _check_share(pool, runs, min(body.max_share, MAX_PIN_SHARE))
    num_pinned = 0
    for run in runs:
        keys = [block.key for block in run]
        num_pinned += pool.pin_prefix(OPERATOR, owner_id, run[0].namespace, keys, now)
    owner = pool.owners.get(owner_id)
    if owner is not None:
        owner.deadline = deadline
    cursor = body.cursor + seen if more else None
    return Slice(num_pinned, cursor=cursor, total_blocks=len(pool.blocks))


def unpin(pool: PoolState, body: UnpinChains) -> Slice:
    """One slice of `UnpinChains`."""
    owner = pool.owners.get(OwnerId(f"{OPERATOR_PREFIX}{body.name}"))
    if owner is None:
        return Slice(0)
    blocks = list(islice(owner.pins, _bounded(body.limit)))
    for block in blocks:
        pool._unpin(block, owner)
    pool.owners.close_if_idle(owner)
    return Slice(len(blocks), cursor=0 if owner.pins else None)


def _runs_to_pin(
    pool: PoolState, body: PinChains, owner_id: OwnerId
) -> tuple[list[list[Block]], int, bool]:
    """Pieces of chains that the owner does not pin yet; how many blocks were looked at and
    whether there are more behind them."""
    owner = pool.owners.get(owner_id)
    held: set[Block] = owner.pins if owner is not None else set()
    fresh: set[Block] = set()
    if body.selection.key:
        block = pool.blocks.get(BlockHash(body.selection.key))
        fits = block is not None and _matches(block, body.selection)
        run = _untaken(block, held, fresh) if block is not None and fits else []
        return ([run] if run else []), 1, False
    runs: list[list[Block]] = []
    for seen, block in enumerate(_walk(pool, body.selection, body.cursor)):
        if seen == _bounded(body.limit):
            return runs, seen, True
        if _matches(block, body.selection) and _is_tip(block):
            run = _untaken(block, held, fresh)
            if run:
                runs.append(run)
    return runs, 0, False


def _untaken(tip: Block, held: set[Block], fresh: set[Block]) -> list[Block]:
    """The end of the chain up to `tip` that is in neither set; it joins `fresh`."""
    run: list[Block] = []
    block: Block | None = tip
    while block is not None and block not in held and block not in fresh:
        run.append(block)
        block = block.parent
    fresh.update(run)
    return run[::-1]


def _check_share(pool: PoolState, runs: list[list[Block]], max_share: float) -> None:
    """Would operators hold too much? Blocks that another pin holds already count once."""
    room = int(max_share * pool.slots.num_slots)
    owners = operators(pool)
    if sum(len(owner.pins) for owner in owners) + sum(map(len, runs)) <= room:
        return
    held: set[Block] = set().union(*(owner.pins for owner in owners))
    num_new = len(set().union(*runs) - held)
    if len(held) + num_new > room:
        raise PinRefusedError(
            "pin_share",
            f"max_share = {max_share:g}: operators may pin {room} of {pool.slots.num_slots} "
            f"blocks; {len(held)} are pinned and {num_new} would be added. Unpin something, "
            "select less, or allow a larger share.",
        )


# --- purge ----------------------------------------------------------------------------------


def purge(pool: PoolState, body: PurgeChains) -> Slice:
    """One slice of `PurgeChains`: withdraws tails before heads."""
    total = len(pool.blocks)
    walk = _walk(pool, body.selection, body.cursor)
    blocks = list(islice(walk, _bounded(body.limit)))
    num_purged = num_in_use = num_skipped = num_kept = 0
    for block in blocks:
        if not _matches(block, body.selection):
            num_kept += 1
        elif not _release_operators(pool, block, allowed=body.include_pinned):
            num_kept += 1
            num_skipped += 1
        elif block.state is not BlockState.WITHDRAWN:  # else it went with its parent
            num_in_use += bool(block.pins) or block.writing or block.copying
            num_purged += withdraw(pool, block)
    more = len(blocks) == _bounded(body.limit)
    namespace = body.selection.namespace
    if namespace and not more and not num_of_namespace(pool, namespace):
        pool._events.cleared(namespace)
    cursor = body.cursor + num_kept if more else None
    left = num_selected(pool, body.selection)
    return Slice(num_purged, num_skipped, num_in_use, cursor, total, left)


def num_selected(pool: PoolState, selection: Selection) -> int:
    """Blocks of a selection, as `Slice.num_left` has them: counted without a walk over the pool."""
    if selection.key:
        below = islice(_walk(pool, selection, 0), MAX_SLICE_BLOCKS)
        return sum(_matches(block, selection) for block in below)
    if selection.tenant is None and not selection.namespace:
        return len(pool.blocks)
    return pool.groups.used_by(selection.tenant, selection.namespace)


def withdraw(pool: PoolState, block: Block) -> int:
    """Take a block and all that follows it out of the index; how many blocks left."""
    before = len(pool.blocks)
    pool._withdraw(block, "purge")
    return before - len(pool.blocks)


def _release_operators(pool: PoolState, top: Block, *, allowed: bool) -> bool:
    """Let operators' pins on a block and below it go; False where there are some and that is not
    allowed."""
    blocks = list(_tail_first(top)) if top.children else [top]
    pins = [(b, owner) for b in blocks for owner in b.pins if owner.id.startswith(OPERATOR_PREFIX)]
    if pins and not allowed:
        return False
    for block, owner in pins:
        pool._unpin(block, owner)
        pool.owners.close_if_idle(owner)
    return True


# --- walking --------------------------------------------------------------------------------


def path_to(block: Block) -> list[Block]:
    """From the chain's head to `block`."""
    path = [block]
    while path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _walk(pool: PoolState, selection: Selection, cursor: int) -> Iterator[Block]:
    """Blocks from position `cursor` on, children before parents. The pool must not change."""
    start = max(0, cursor)
    if not selection.key:
        return islice(reversed(pool.blocks.values()), start, None)
    top = pool.blocks.get(BlockHash(selection.key))
    return islice(_tail_first(top), start, None) if top is not None else iter(())


def _tail_first(top: Block) -> Iterator[Block]:
    """`top` and all below it, children before parents."""
    stack: list[tuple[Block, Iterator[Block]]] = [(top, iter(top.children.values()))]
    while stack:
        block, children = stack[-1]
        child = next(children, None)
        if child is None:
            stack.pop()
            yield block
        else:
            stack.append((child, iter(child.children.values())))


def _matches(block: Block, selection: Selection) -> bool:
    """Without the key: the walk sees to that."""
    if selection.namespace and block.namespace != selection.namespace:
        return False
    return selection.tenant is None or block.tenant == selection.tenant


def _is_selected(block: Block, selection: Selection) -> bool:
    """Is it this very block, where a key is given?"""
    return _matches(block, selection) and selection.key in (b"", block.key)


def _is_tip(block: Block) -> bool:
    """The last block of a chain that is held."""
    return block.held and not any(child.held for child in block.children.values())


def _bounded(limit: int) -> int:
    return max(1, min(limit, MAX_SLICE_BLOCKS))


def _chain_info(pool: PoolState, tip: Block, now: float) -> ChainInfo:
    path = path_to(tip)
    keys = [block.key for block in path]
    use = pool.policy.use_of(tip.key) or pool.disk.evictor.use_of(tip.key)
    names = sorted(o.id for o in tip.pins if o.id.startswith(OPERATOR_PREFIX))
    return ChainInfo(
        namespace=tip.namespace,
        tenant=tip.tenant,
        head=keys[0],
        tip=tip.key,
        num_blocks=len(path),
        num_on_disk=pool.holds(tip.namespace, keys).count("s"),
        pins=len(tip.pins),
        pinned_by=[name.removeprefix(OPERATOR_PREFIX) for name in names],
        hits=None if use is None else use.uses,
        idle_seconds=None if use is None else max(0.0, now - use.last_use),
    )
