"""Eviction policies: they order and choose, the pool keeps all else."""
