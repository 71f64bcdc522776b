"""Models of the `diffusers` library as models of this one: its own layers, trained by flow matching.

A diffusion transformer's forward embeds the time and the prompt, and gives both to every one of its blocks. Here they
are embedded once: the prompt by a module of its own behind the text encoder, the time by the transformer's first
layer; from there they go to the blocks as streams. What else blocks are called with, rotary positions and masks, is
context. As with the `transformers` library, its own forward says what that is: it runs with holes in it, once for all
samples of one size, so that samples of several sizes are packed without padding and each attends to itself alone.
"""
