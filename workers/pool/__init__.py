"""The pool's bytes: the shared-memory slab."""
