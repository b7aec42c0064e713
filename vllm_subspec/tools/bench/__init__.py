"""``vllm-subspec bench``: speculative methods of vLLM side by side on one machine, in one run."""
