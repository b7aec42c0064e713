"""What trees can be verified beside, for the start that refuses and for the layers that look again."""

ATTENTION_BACKENDS = ("FLASH_ATTN", "TRITON_ATTN", "CPU_ATTN")
"""vLLM's attention backends beside which tree attention was tested."""
LEAVE_OUT = "leave the method out"
