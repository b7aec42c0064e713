"""Attention over vLLM's paged KV cache with a tree mask."""
