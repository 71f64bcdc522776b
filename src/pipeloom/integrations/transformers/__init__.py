"""Train models of the `transformers` library with their own layers.

A model's forward pass does more than call its blocks: it computes positions, masks, window orders and the places of
images. Pipeloom does not reimplement this. It runs the library's own forward pass on a hollow copy of the model, in
which some parts are replaced (see `hollow`). The first layer runs it up to the first block, and the last layer runs it
from the last block on. A third copy, whose blocks only record their arguments, provides the arguments of all blocks.
So a family is only a table entry that names the parts of the model.
"""
