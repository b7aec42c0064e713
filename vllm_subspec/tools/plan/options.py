"""Reading a command line that is meant for vLLM. No heavy imports: a server's start goes through here."""

from __future__ import annotations

ALIASES = {
    "-sc": "--speculative-config",
    "-cc": "--compilation-config",
    "--device-memory-utilization": "--gpu-memory-utilization",
}


def take_option(name: str, rest: list[str]) -> tuple[str | None, list[str]]:
    """Take ``name VALUE`` or ``name=VALUE`` out of a command line: the last value, and what is left.

    Raises:
        ValueError: the option ends the line.
    """
    value, left = None, []
    words = iter(rest)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None:
                raise ValueError(f"{name} needs a value")
        elif word.startswith(f"{name}="):
            value = word[len(name) + 1 :]
        else:
            left.append(word)
    return value, left


def attach_negative(name: str, words: list[str]) -> list[str]:
    """``name -8GiB`` as ``name=-8GiB``, so that argparse does not take the value for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1] == name and word.startswith("-") and not _is_option(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def options(rest: list[str]) -> dict[str, str]:
    """vLLM's options on a command line, spelled as its help does, each with the word after it ("" without one)."""
    found: dict[str, str] = {}
    for word, following in zip(rest, [*rest[1:], ""]):
        if _is_option(word):
            name, equals, value = word.partition("=")
            name = name.split(".")[0].replace("_", "-")  # --speculative-config.method is vLLM's dotted spelling
            found[ALIASES.get(name, name)] = value if equals else "" if _is_option(following) else following
    return found


def _is_option(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()
