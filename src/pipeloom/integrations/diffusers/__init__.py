"""Train transformers of the `diffusers` library by flow matching, with their own layers.

A diffusion transformer embeds the time and the prompt, and passes both to each of its blocks. Here a separate module
after the text encoder embeds the prompt, and the transformer's first layer embeds the time. Both go to the blocks as
streams. The other arguments of the blocks, such as rotary positions and masks, are context. They are recorded from the
library's own forward pass on a hollow model, as in the `transformers` integration, once for all samples of one size. So
samples of different sizes are packed without padding, and each attends only to itself.
"""
