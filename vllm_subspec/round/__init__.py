"""Does a round: draft, verify, commit.

In: the last token, a block table, the draft model, the target's logits. Out: the accepted path, its KV in place. May touch
the KV slots that the request was granted, and vLLM's attention and sampler by calling them.
"""
