"""Joins vLLM.

In: vLLM's calls and the user's options. Out: an engine whose runner does rounds. May touch everything of vLLM's that the
manifest in ``patches/`` lists, by hook, subclass or named patch; nobody below does.
"""
