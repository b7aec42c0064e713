"""The draft: the target with 4-bit substitutes for its offloaded linears (paper, section 4.1)."""
