"""Other ways to hand out KV memory than pages as tokens come, behind the protocol in engine/kv_policy.py.

    reserve     all pages that a request could ever need, at admission: it never waits again
    predicted   pages as tokens come, but admission only of what is expected to be held to the end
    extent      a run of pages in a row of the predicted length, at admission (a VM allocator's way)

What predicts lengths is in length.py and learned_length.py; options.py has the engine's options that choose among all.
"""
