"""Defines further KV policies, besides pages on demand, behind the protocol in engine/kv_policy.py.

    Reserve     takes all pages that a request could ever need at admission: it never waits again
    Predicted   takes pages as tokens come, but admits only as much as should fit to the end
    Extent      takes a contiguous run of pages of the predicted length at admission (as a VM allocator does)

`Engine(kv_policy=...)` takes one as an object, with its own options, or by its name. length.py predicts lengths.
runs.py has the page pool of extents.
"""
