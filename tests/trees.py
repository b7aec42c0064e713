"""Random trees, and the definitions of the algorithm in plain Python."""

from __future__ import annotations

import random

import torch

from vllm_subspec.round.tree import TokenTree


def random_tree(rnd: random.Random, num_nodes: int, vocabulary: int) -> TokenTree:
    """Any tree in which siblings carry different tokens."""
    tree = TokenTree.empty(num_nodes)
    tree.tokens[0] = rnd.randrange(vocabulary)
    taken: dict[int, set[int]] = {}
    for node in range(1, num_nodes):
        parent = rnd.choice([p for p in range(node) if len(taken.get(p, ())) < vocabulary])
        token = rnd.choice([t for t in range(vocabulary) if t not in taken.get(parent, ())])
        taken.setdefault(parent, set()).add(token)
        tree.tokens[node], tree.parents[node] = token, parent
        tree.depths[node] = tree.depths[parent] + 1
        tree.ancestors[node] = tree.ancestors[parent]
        tree.ancestors[node, node] = True
    return tree


def path_to(tree: TokenTree, node: int) -> list[int]:
    """Nodes from the root to ``node``, both included."""
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[path[-1]]))
    return path[::-1]


def walk(tree: TokenTree, target_tokens: list[int]) -> list[int]:
    """The accepted path, by walking: at each node to the child that carries the target's token."""
    path = [0]
    while True:
        children = [n for n in range(1, len(tree)) if tree.parents[n] == path[-1]]
        match = [n for n in children if tree.tokens[n] == target_tokens[path[-1]]]
        if not match:
            return path
        (child,) = match
        path.append(child)


def beam(logits_of, root: int, width: int, depth: int, temperature: float) -> list[list[tuple[tuple[int, ...], float]]]:
    """The draft tree as lists: per level, (token path from the root, score), best first.

    Args:
        logits_of: token path -> list of logits
    """
    levels, leaves = [], [((root,), 0.0)]
    for _ in range(depth):
        candidates = []
        for path, score in leaves:
            logits = torch.tensor(logits_of(path), dtype=torch.float64) / temperature
            log_q = logits - torch.logsumexp(logits, 0)
            candidates += [((*path, token), score + float(q)) for token, q in enumerate(log_q)]
        leaves = sorted(candidates, key=lambda c: -c[1])[:width]
        levels.append(leaves)
    return levels
