"""Measures and shows: the command line, plan, bench, trace, demo and the small models.

In: what a user types. Out: tables, files, a server. May start engines through vLLM's public interface and ask them through
``collective_rpc``; no engine imports anything from here.
"""
