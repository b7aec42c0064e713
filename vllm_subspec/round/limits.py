"""What trees can be verified beside, for the start that refuses and for the layers that look again."""

ATTENTION_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""vLLM's attention backends beside which tree attention was tested."""
LEAVE_OUT = "leave the method out"


def most_nodes(max_model_len: int) -> int:
    """Nodes of the largest tree that a request can ever have verified: a prompt of one token and the root come before
    them, and vLLM keeps room for the token after. At least 1, so that there is a tree to speak of."""
    return max(1, max_model_len - 3)


def fitting_tree(width: int, depth: int, nodes: int) -> tuple[int, int]:
    """The same tree if it has so many nodes at most; else one less deep, and less wide if even one level has more."""
    if width * depth <= nodes:
        return width, depth
    width = min(width, nodes)
    return width, nodes // width
