"""The six chat prompts of the demo and of the acceptance-length figures."""

PROMPTS = (
    "Write a short poem about the sea.",
    "Explain how a hash table works.",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that reverses a linked list.",
    "A farmer has 17 sheep and buys 5 more, then sells 9. How many sheep are left? Explain step by step.",
    "Give three tips for staying healthy.",
)
