"""Runs one model on several devices, each with a share of every layer (tensor parallelism, Shoeybi et al., arXiv
1909.08053).

mesh      makes meshes, checks that they fit a model, and makes the config of one device's share ranks     turns a
function of one device's share into a function of the whole model values    moves a layer's values between devices where
they are tapped or edited memory    reads how much memory a device has free

The shares of the weights are in jllm/model/shards.py.
"""
