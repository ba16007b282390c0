"""Moves blocks between the slabs of nodes. `engine.TransferEngine` is the way in."""
