"""Reading, and after a round compacting, the engine's own KV cache."""
