"""What a user may name on vLLM's command line by module and class."""

from __future__ import annotations


class Worker:
    """A worker extension: its methods are reached by ``collective_rpc``."""

    def model_class(self) -> str:
        return type(self.model_runner.model).__name__
