"""The shape of a draft."""

import pytest

from jllm.speculative.tree import MOST_NODES, Tree, chain

pytest.importorskip("hypothesis")
from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

trees = st.integers(0, MOST_NODES - 1).flatmap(lambda n: st.tuples(*(st.integers(0, i) for i in range(n)))).map(Tree)


@given(trees)
def test_everything_follows_from_the_parents(tree):
    masks = tree.ancestors()
    assert masks.shape == (tree.size, -(-tree.size // 32))
    for node in range(tree.size):
        up, path = node, [node]
        while up:
            up = tree.parents[up - 1]
            path.insert(0, up)
        assert tree.paths[node] == tuple(path)
        assert tree.depths[node] == len(path) - 1
        bits = sum(int(word) << 32 * i for i, word in enumerate(masks[node]))
        assert bits == sum(1 << j for j in path)
    assert sorted(n for level in tree.levels() for n in level) == list(range(tree.size))
    assert all(tree.depths[n] == d for d, level in enumerate(tree.levels()) for n in level)
    children = {(0 if not n else tree.parents[n - 1], tree.ranks[n]) for n in range(1, tree.size)}
    assert len(children) == tree.size - 1, "siblings have distinct ranks"
    assert tree.is_chain == (tree == chain(tree.size - 1))


@pytest.mark.parametrize("parents", [(1,), (0, 2), (-1,), (0,) * MOST_NODES])
def test_what_is_no_tree(parents):
    with pytest.raises(ValueError, match="tree"):
        Tree(parents)
