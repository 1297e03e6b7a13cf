"""Other ways to hand out KV memory than pages as tokens come, behind the protocol in engine/kv_policy.py.

    Reserve     all pages that a request could ever need, at admission: it never waits again
    Predicted   pages as tokens come, but admission only of what is expected to be held to the end
    Extent      a run of pages in a row of the predicted length, at admission (a VM allocator's way)

`Engine(kv_policy=...)` takes one as an object, with its own options, or by its name. length.py predicts
lengths; runs.py has the page pool of extents.
"""
