"""24 varied prompts: chat, code, lists, other languages, numbers, plain continuations, one token, several hundred."""

from vllm_subspec.tools.prompts import PROMPTS

CHAT = [
    *PROMPTS,
    "Translate to French: 'The library opens at nine.'",
    "List the planets of the solar system in order.",
    "What is 17 * 23? Show your work.",
    "Write a haiku about autumn leaves.",
    "Summarize the plot of Romeo and Juliet in two sentences.",
    "Give me a JSON object with the keys name, age and city for a made-up person.",
    "Why is the sky blue?",
    "Write a regular expression that matches an email address.",
    "Continue the sequence: 2, 4, 8, 16,",
    "¿Cuál es la capital de España?",
    "Explain recursion to a ten-year-old.",
    "Write a limerick about a cat who codes.",
]

PLAIN = [
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6,",
    "Once upon a time, in a village by the sea, there lived",
    "A",
    " ".join(f"Line {i}: the value of item {i} is {i * i}." for i in range(40)),
]


def requests(max_tokens: int, count: int | None = None) -> list[dict]:
    """Greedy requests, interleaved so that a part is representative."""
    prompts = [[{"role": "user", "content": text}] for text in CHAT] + PLAIN
    order = sorted(range(len(prompts)), key=lambda i: (i * 7) % len(prompts))
    return [{"prompt": prompts[i], "params": {"temperature": 0.0, "max_tokens": max_tokens}} for i in order[:count]]
