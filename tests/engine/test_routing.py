"""Where a request goes: by hand."""

from jllm.distributed.routing import Load, route


def test_the_fewest_tokens_win_and_the_first_of_equals():
    loads = [Load(4, 8) for _ in range(3)]
    assert route(loads, (1, 2, 3), 10) == (0, 13)
    assert route(loads, (4, 5), 5) == (1, 7)
    assert route(loads, (6,), 1) == (2, 2)
    assert route(loads, (), 9) == (2, 10), "a prompt that is computed counts one token"
    assert route(loads, (7,), 1) == (1, 2)
    assert [load.tokens for load in loads] == [13, 9, 12]


def test_whole_pages_of_a_known_beginning_do_not_count():
    loads, start = [Load(4, 8), Load(4, 8)], tuple(range(9))
    assert route(loads, start, 10) == (0, 19)
    assert loads[0].uncached((*start, 50)) == 2
    assert loads[0].uncached((0, 1, 2, 3, 99, 5, 6, 7)) == 4, "one page is alike"
    assert loads[0].uncached(start[:8]) == 1, "one token at least is computed"
    assert loads[1].uncached(start) == 9
    loads[1].tokens = 10
    assert route(loads, start, 1) == (1, 10), "with eight tokens more to compute it still has less to do"
    loads[1].forget_prefixes()
    assert loads[1].uncached(start) == 9


def test_what_was_seen_last_is_kept():
    load = Load(1, 3)
    for prompt in ((1, 2), (3,), (1, 2), (4,)):
        load.remember(prompt)
    assert [load.uncached(prompt) for prompt in ((1, 2, 9), (3, 9), (4, 9))] == [1, 2, 1]
