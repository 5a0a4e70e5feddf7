"""The reported failure, stock and ours side by side: saves and loads on a GPU that is full.

The one package of the product that uses :mod:`landfall.testing`, for the tripwire where there is no GPU.
"""
