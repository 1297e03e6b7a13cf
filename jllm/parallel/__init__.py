"""One model on several devices: each has a share of every layer (tensor parallelism, Shoeybi et al., arXiv 1909.08053).

mesh      which devices, and whether they fit a model; the config of one device's share
shares    a device's share of each weight, from the axes that the table of weights names
values    what is whole of a layer's values, where they are tapped or edited
ranks     a function of a whole model, from the same function of one device's share
"""
