"""Models of the `transformers` library as models of this one: its own layers, called as its own forward calls them.

Between the layers of a tower a model's forward does much that is no layer: positions, masks, window orders, the places
of images. None of it is written anew here. The library's own forward runs with holes in it: in the first layer up to
the first block, in the last one from the last block on, and with blocks that only note what they are called with
wherever the other layers' arguments are wanted. So a family is a table entry: which of its parts are which.
"""
