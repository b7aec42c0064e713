"""The token tree: its data, how a draft grows it, how the target's choices accept a path of it."""

from .accept import accept
from .grow import grow
from .token_tree import TokenTree

__all__ = ["TokenTree", "accept", "grow"]
