"""The data room: from rows in files to the micro batches of a step.

``prepare`` reads every row once, before training: tokens, labels, sizes of images, mistakes. Images are
opened when their row is trained on, in the loader's workers. Which rows a step trains on is a pure
function of the step (``Stream``). Nothing in this room imports megatron-core.
"""
