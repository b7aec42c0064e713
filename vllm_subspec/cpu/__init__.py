"""All that exists for vLLM's CPU builds only.

In: a process on a CPU build. Out: Triton interpreted, and torch versions of what the interpreter is too slow for or
rejects. May touch the environment and Triton's table of backends; reached from `engine` only.
"""
