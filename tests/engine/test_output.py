"""What tokens' text shows at once, holds back, and is cut to by stop strings; by hand."""

import pytest

from jllm.engine.output import OutputText


class Pieces:
    """A decoder for which token i is the i-th of these texts, and the last one is what is left at the end."""

    def __init__(self, *texts: str):
        self.texts = texts

    def push(self, id):
        return self.texts[id]

    def finish(self):
        return self.texts[-1]


# Text of each token and of what is left at the end, stop strings: texts that are shown, tokens that are shown with
# each, and whether a stop string was found.
CASES = [
    (("a", "b", ""), (), ["a", "b", ""], [1, 1, 0], False),
    (("a", "", "bc", ""), (), ["a", "", "bc", ""], [1, 0, 2, 0], False),  # bytes that wait for the rest of a character
    (("a", "", "?"), (), ["a", "", "?"], [1, 0, 1], False),
    (("one two", ""), ("two", "one"), ["", ""], [0, 0], True),  # the earliest, not the one that is named first
    (("one two", ""), ("one", "two"), ["", ""], [0, 0], True),
    (("aXb", "c", ""), ("X",), ["a", "", ""], [1, 0, 0], True),  # a token inside of which a stop begins stays
    (("a", "", "bXc", ""), ("X",), ["a", "", "b", ""], [1, 0, 2, 0], True),  # and so do those of a character with it
    (("ab", "", "cX", "d", ""), ("cXd",), ["ab", "", "", "", ""], [1, 0, 0, 0, 0], True),
    (("a", "x", "Xb", ""), ("xX", "c"), ["a", "", "", ""], [1, 0, 0, 0], True),
    (("a", "x", "b", ""), ("xX",), ["a", "", "xb", ""], [1, 0, 2, 0], False),
    (("a", "xX", ""), ("XXY",), ["a", "x", "X"], [1, 0, 1], False),  # a token is shown with the last of its text
    (("xX", "xX", "y", ""), ("XxXy",), ["x", "", "", ""], [0, 0, 1, 0], True),
    (("a", "b", "cd"), ("bc",), ["a", "", ""], [1, 0, 0], True),  # completed by what was left
    (("aa", "ab", ""), ("aab",), ["", "a", ""], [0, 1, 0], True),
]


@pytest.mark.parametrize(("texts", "stops", "shown", "counts", "stopped"), CASES)
def test_what_is_shown_when(texts, stops, shown, counts, stopped):
    output, taken = OutputText(Pieces(*texts), stops), []
    for token in range(len(texts) - 1):
        if not output.stopped:
            output.push(token)
        taken.append(output.news(final=False))
    output.finish()
    taken.append(output.news(final=True))
    assert [text for text, _ in taken] == shown
    assert [len(tokens) for _, tokens in taken] == counts
    assert (output.text, output.tokens) == ("".join(shown), list(range(sum(counts))))
    assert output.stopped == stopped
    assert output.text_can_be_late == (not stops)
