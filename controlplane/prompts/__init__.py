"""Prompts of recorded requests, as block keys and token ids: what misses are explained by."""
